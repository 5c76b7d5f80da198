"""Traceable routines that read their tool: arrays are inputs of the program, other values guard it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda

pytestmark = pytest.mark.usefixtures("attached_driver")

X, W = jnp.arange(6.0).reshape(2, 3) / 7, jnp.ones((3, 3)) / 3
TIMES = 4


class Scaling(amanda.Tool):
    """Multiplies each tanh by what the tool holds."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.add_inst_for_op(self.insert)

    def insert(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "tanh":
            context.insert_after_op(self.scaled)

    @amanda.traceable
    def scaled(self, x: Any) -> Any:
        """Return a value, scaled."""
        return x * self.scale


inner = jax.jit(lambda w, x: jnp.tanh(x @ w))


def nested(w: Any, x: Any) -> Any:
    return inner(w, x).sum()


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=3)[0].sum()


STEPS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "jit of grad": lambda f: jax.jit(jax.value_and_grad(f)),
    "grad of jit": lambda f: jax.value_and_grad(jax.jit(f)),
}
KINDS: dict[str, tuple[Callable[[int], Any], int]] = {
    "array": (lambda number: jnp.full((2, 3), float(number)), 1),
    "scalar": (jnp.float32, 1),
    "NumPy": (lambda number: np.full((2, 3), number, np.float32), 1),
    "number": (float, TIMES),
}
"""Makers of a scale, and how often a function is traced for as many scales."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("program", [nested, scanned], ids=lambda item: item.__name__)
def test_a_routine_reads_what_its_tool_holds_at_each_call(
    program: Callable[..., Any], step: str, kind: str
) -> None:
    traced: list[None] = []

    def counted(w: Any, x: Any) -> Any:
        traced.append(None)
        return program(w, x)

    def by_hand(scale: Any) -> Any:
        def scaled(w: Any, x: Any) -> Any:
            if program is nested:
                return (jnp.tanh(x @ w) * scale).sum()
            return lax.scan(lambda h, _: (jnp.tanh(h @ w) * scale, None), x, None, length=3)[0].sum()

        return scaled

    make, times = KINDS[kind]
    tool, run, values = Scaling(make(1)), STEPS[step](counted), []
    with amanda.apply(tool) as scope:
        for scale in range(1, TIMES + 1):
            tool.scale = make(scale)
            values.append(jax.tree_util.tree_leaves(run(W, X))[0])
    assert np.allclose(values, [by_hand(scale)(W, X) for scale in range(1, TIMES + 1)], rtol=1e-6)
    assert len(traced) == times
    assert not list(scope.report)


def test_an_array_of_numpy_that_is_written_into_is_read_anew() -> None:
    tool, step = Scaling(np.ones((2, 3), np.float32)), jax.jit(nested)
    with amanda.apply(tool):
        before = step(W, X)
        tool.scale[:] = 2
        assert np.allclose(step(W, X), 2 * before, rtol=1e-6)


def test_an_array_of_another_shape_is_traced_for() -> None:
    tool, step = Scaling(jnp.ones((2, 3))), jax.jit(nested)
    with amanda.apply(tool):
        before = step(W, X)
        tool.scale = jnp.full((1, 3), 2.0)
        assert np.allclose(step(W, X), 2 * before, rtol=1e-6)


@pytest.mark.parametrize("kind", [float, bool])
def test_an_array_may_decide_in_python(kind: type) -> None:
    class Choosing(Scaling):
        """Doubles values while a switch, an array, is on."""

        @amanda.traceable
        def scaled(self, x: Any) -> Any:
            on = float(self.scale) > 0 if kind is float else bool(self.scale > 0)
            return x * 2 if on else x

    tool, step = Choosing(jnp.float32(1)), jax.jit(nested)
    with amanda.apply(tool):
        doubled = step(W, X)
        tool.scale = jnp.float32(0)
        assert np.allclose(2 * step(W, X), doubled, rtol=1e-6)


def test_a_routine_that_sets_something_runs_at_each_execution() -> None:
    class Setting(Scaling):
        """Counts its executions."""

        @amanda.traceable
        def scaled(self, x: Any) -> Any:
            self.scale = self.scale + 1
            return x

    tool, step = Setting(0), jax.jit(nested)
    with amanda.apply(tool):
        for _ in range(TIMES):
            step(W, X)
    assert tool.scale == TIMES


def replacing(context: amanda.OpContext, routine: Callable[..., Any]) -> None:
    context.replace_op(lambda x: routine(jnp.tanh(x)))


def differentiable(context: amanda.OpContext, routine: Callable[..., Any]) -> None:
    context.insert_after_op(amanda.differentiable(lambda x: routine(x)))


def replacing_backward(context: amanda.OpContext, routine: Callable[..., Any]) -> None:
    if context.is_backward():
        context.replace_backward_op(lambda gradient: routine(gradient))


class Within(amanda.Tool):
    """Scales each tanh in a routine that is a part of the program in any case."""

    def __init__(self, insert: Callable[..., None], scale: Any) -> None:
        super().__init__()
        self.insert, self.scale = insert, scale
        self.add_inst_for_op(self.analyse)
        if insert is replacing_backward:
            self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_forward_op_type() == "tanh":
            self.insert(context, self.scaled)

    def scaled(self, x: Any) -> Any:
        """Return a value, scaled."""
        return x * self.scale


@pytest.mark.parametrize("make", [float, jnp.float32, np.float32], ids=["number", "array", "NumPy"])
@pytest.mark.parametrize("insert", [replacing, differentiable, replacing_backward])
def test_a_program_is_traced_anew_for_what_a_replacement_reads(
    insert: Callable[..., None], make: Callable[[int], Any]
) -> None:
    tool, step = Within(insert, make(1)), jax.jit(jax.grad(nested))
    results = []
    with amanda.apply(tool) as scope:
        for scale in (1, 2, 3, 2):
            tool.scale = make(scale)
            results.append(step(W, X))
    if insert is replacing_backward:  # its gradient does not pass tanh
        expected = [scale * results[0] for scale in (1, 2, 3, 2)]
    else:
        expected = [scale * jax.grad(nested)(W, X) for scale in (1, 2, 3, 2)]
    assert np.allclose(results, expected, rtol=1e-6)
    assert not list(scope.report)


@pytest.mark.parametrize("insert", [replacing, differentiable])
def test_a_replacement_that_reads_what_changes_often_is_reported(insert: Callable[..., None]) -> None:
    tool, step = Within(insert, 0.0), jax.jit(nested)
    with amanda.apply(tool) as scope:
        values = []
        for scale in range(12):
            tool.scale = float(scale)
            values.append(float(step(W, X)))
    assert np.allclose(values[:8], [scale * nested(W, X) for scale in range(8)], rtol=1e-6)
    ((_, reason, _),) = scope.report
    assert reason.startswith("what it reads changes often: scale; it stays as it was")
    with amanda.apply(tool) as again:
        step(W, X)
    assert len(list(again.report)) == 1


def test_a_replacement_that_sets_something_is_reported() -> None:
    class Setting(Within):
        """Counts its executions."""

        def scaled(self, x: Any) -> Any:
            self.scale = self.scale + 1
            return x

    with amanda.apply(Setting(replacing, 0)) as scope:
        jax.jit(nested)(W, X)
    ((subject, reason, _),) = scope.report
    assert "replace_op" in subject
    assert reason.startswith("it sets scale, as the function is traced")


def test_a_replacement_in_a_backward_pass_outside_of_jit_is_reported() -> None:
    tool, step = Within(replacing_backward, 1.0), jax.grad(jax.jit(nested))
    with amanda.apply(tool) as scope:
        step(W, X)
    ((_, reason, _),) = scope.report
    assert reason.startswith("what it reads is not followed where a backward pass runs outside of jit")

"""Traceable routines that read their tool: arrays are inputs of the program, other values guard it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

X, W = jnp.arange(6.0).reshape(2, 3) / 7, jnp.ones((3, 3)) / 3
TIMES = 4


@pytest.fixture(autouse=True)
def _attached() -> Iterator[None]:
    with attached(JaxDriver):
        yield


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
    "array": (lambda one: jnp.full((2, 3), float(one)), 1),
    "scalar": (jnp.float32, 1),
    "NumPy": (lambda one: np.full((2, 3), one, np.float32), 1),
    "number": (float, TIMES),
}
"""What makes a scale, and how often a function is traced for as many scales."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("program", [nested, scanned], ids=lambda one: one.__name__)
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
            return lax.scan(lambda one, _: (jnp.tanh(one @ w) * scale, None), x, None, length=3)[0].sum()

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

"""Programs under jit, derivatives, loops and maps: as bare, with every execution seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.errors import RoutineError

pytestmark = pytest.mark.usefixtures("attached_driver")

X, W = jnp.arange(6.0).reshape(2, 3) / 7, jnp.ones((3, 3)) / 3


class Counting(amanda.Tool):
    """Counts executions of each op, and of each backward op."""

    def __init__(self, values: bool = True) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.select = None if values else []
        self.add_inst_for_op(self.count)
        self.add_inst_for_op(self.count_backward, backward=True)

    def count(self, context: Any) -> None:
        name = context.get_op_type()
        context.insert_before_op(lambda *_: self.forward.update([name]), self.select)

    def count_backward(self, context: Any) -> None:
        name = context.get_backward_op().__name__
        context.insert_before_backward_op(lambda *_: self.backward.update([name]), self.select)


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=5)[0].sum()


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: jnp.cos(x @ w)).sum()


def mapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: jnp.tanh(row @ w))(x).sum()


def checkpointed(w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x).sum()


TIMES = {dense: 1, scanned: 5, branched: 1, mapped: 2, checkpointed: 1}


@pytest.mark.parametrize("values", [True, False], ids=["values", "none"])
@pytest.mark.parametrize("program", TIMES, ids=lambda item: item.__name__)
def test_every_execution_is_seen(program: Callable[..., Any], values: bool) -> None:
    step = jax.jit(jax.grad(program))
    plain = step(W, X)
    tool = Counting(values)
    with amanda.apply(tool) as scope:
        assert np.allclose(step(W, X), plain, rtol=1e-6)  # a callback may keep XLA from fusing
    times = TIMES[program]
    assert tool.forward["dot_general"] == tool.forward["tanh"] == times
    assert tool.backward["dot_general_transpose"] == tool.backward["tanh_transpose"] == times
    assert not list(scope.report)


def test_a_compiled_function_goes_back_to_its_executable() -> None:
    traced = []

    @jax.jit
    def program(x: Any) -> Any:
        traced.append(x)
        return x * 2

    program(X)
    for _ in range(2):
        tool = Counting()
        with amanda.apply(tool):
            program(X)
            program(X)
        assert tool.forward["mul"] == 2
        program(X)
    assert len(traced) == 3


def test_a_mask_is_passed_straight_through() -> None:
    mask = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], np.float32)
    by_hand = jax.jit(jax.grad(lambda w, x: dense(w + lax.stop_gradient(w * mask - w), x)))(W, X)
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context.get_op_type() == "dot_general":
            context.insert_before_op(lambda w: w * mask, inputs=[1])

    tool.add_inst_for_op(analyse)
    for step in (jax.jit(jax.grad(dense)), jax.grad(jax.jit(dense)), jax.grad(dense)):
        with amanda.apply(tool):
            assert np.allclose(step(W, X), by_hand, rtol=1e-6)


def test_an_exception_of_a_routine_is_itself() -> None:
    class Mistake(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Mistake("of mine")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fail))
    step = jax.jit(dense)
    with amanda.apply(tool), pytest.raises(Mistake, match="of mine") as caught:
        step(W, X)
    assert any("tool Tool" in note for note in caught.value.__notes__)
    assert np.array_equal(step(W, X), jax.jit(dense)(W, X))


def test_what_was_compiled_ahead_of_time_is_reported() -> None:
    compiled = jax.jit(dense).lower(W, X).compile()
    with amanda.apply(Counting()) as scope:
        compiled(W, X)
    assert len(list(scope.report)) == 1


def _loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(carry) * 2, x)


@pytest.mark.parametrize("function", [_loop, jax.grad(lambda x: _loop(x).sum()), jax.vmap(_loop)])
def test_a_function_is_lowered_and_exported_in_a_scope_as_without(function: Any) -> None:
    def results() -> list[Any]:
        jitted = jax.jit(function)
        exported = jax.export.export(jitted)(X[0])
        compiled = jitted.lower(X[0]).compile()
        return [exported.mlir_module(), exported.serialize(), compiled.cost_analysis()]

    alone = results()
    with amanda.apply(Counting()):
        assert results() == alone


@pytest.mark.parametrize("routine", [lambda *_: None, lambda value: np.array(value)])
def test_weak_types_of_a_program_stay(routine: Any) -> None:
    def program(x: Any) -> list[Any]:
        factor = jnp.where(x.sum() > 0, 2.0, 1.0)  # weak, so that the product has the type of `x`
        half = lax.fori_loop(0, 3, lambda _, value: value * 0.5, 1.0)
        return [factor, half, x * factor * half]

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(routine, outputs=[0]))
    alone = jax.jit(program)(jnp.ones(3, jnp.bfloat16))
    with amanda.apply(tool):
        results = jax.jit(program)(jnp.ones(3, jnp.bfloat16))
    for result, expected in zip(results, alone, strict=True):
        assert (result.dtype, result.weak_type) == (expected.dtype, expected.weak_type)
        assert np.array_equal(result, expected)


def test_run_goes_from_the_forward_to_the_backward_routine_of_one_execution() -> None:
    tool, sums = amanda.Tool(), []

    def forward(x: Any, run: dict[str, Any]) -> None:
        run["sum"] = float(np.sum(x))

    def after(y: Any, run: dict[str, Any]) -> None:
        sums.append(run["sum"])

    def analyse(context: Any) -> None:
        if context.get_op_type() == "tanh":
            context.insert_before_op(forward)
            context.insert_after_op(after)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        jax.jit(scanned)(W, X)
    assert len(set(sums)) == 5


@jax.custom_jvp
def squared(x: Any) -> Any:
    return x * x


squared.defjvp(lambda primals, tangents: (squared(*primals), 2 * primals[0] * tangents[0]))


@jax.custom_vjp
def cubed(x: Any) -> Any:
    return x * x * x


cubed.defvjp(lambda x: (cubed(x), x), lambda x, cotangent: (3 * x * x * cotangent,))


def looped(x: Any) -> Any:
    return lax.while_loop(
        lambda state: state[0] < 4, lambda state: (state[0] + 1, jnp.sin(state[1])), (0, x)
    )[1].sum()


@pytest.mark.parametrize(
    ("program", "op", "times"),
    [
        (looped, "sin", 4),
        (lambda x: jax.jvp(lambda x: jnp.sin(x).sum(), (x,), (x,)), "sin", 1),
        (lambda x: jax.linearize(lambda x: jnp.sin(x).sum(), x)[1](x), "sin", 1),
        (lambda x: jax.hessian(lambda x: jnp.sin(x).sum())(x), "sin", 1),
        (lambda x: jax.grad(lambda x: squared(x).sum())(x), "mul", 2),  # x * x, and 2 * x of the rule
        (lambda x: jax.grad(lambda x: cubed(x).sum())(x), "custom_vjp_call", 1),  # its rule calls it
        (lambda x: jax.grad(jax.jit(lambda x: jnp.sin(x).sum()))(x), "sin", 1),
    ],
    ids=["while", "jvp", "linearize", "hessian", "custom_jvp", "custom_vjp", "grad of jit"],
)
def test_transformations_compute_what_they_do_without_a_tool(
    program: Callable[..., Any], op: str, times: int
) -> None:
    step = jax.jit(program)
    plain = jax.tree_util.tree_leaves(step(X))
    tool = Counting()
    with amanda.apply(tool) as scope:
        under = jax.tree_util.tree_leaves(step(X))
    assert all(np.allclose(value, expected, rtol=1e-6) for value, expected in zip(under, plain, strict=True))
    assert tool.forward[op] == times
    assert not list(scope.report)


nested = jax.jit(lambda w, x: jnp.tanh(x @ w))


def twice(w: Any, x: Any) -> Any:
    return (nested(w, x) + nested(w, x + 1)).sum()


@pytest.mark.parametrize("how", ["jit of grad", "grad of jit", "grad"])
@pytest.mark.parametrize("program", [*TIMES, twice], ids=lambda item: item.__name__)
def test_run_goes_from_the_forward_to_the_backward_op_in_every_program(
    program: Callable[..., Any], how: str
) -> None:
    tool, handed = amanda.Tool(), []

    def before(x: Any, run: dict[str, Any]) -> None:
        run["sum"] = float(np.sum(x))

    def after(y: Any, run: dict[str, Any]) -> None:
        run["done"] = True

    def forward(context: Any) -> None:
        if context.get_op_type() == "tanh":
            context.insert_before_op(before)
            context.insert_after_op(after)

    def backward(context: Any) -> None:
        if context.get_forward_op_type() == "tanh":
            context.insert_before_backward_op(lambda g, run: handed.append((run["sum"], run["done"])))

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    grad = jax.grad(jax.jit(program)) if how == "grad of jit" else jax.grad(program)
    step = jax.jit(grad) if how == "jit of grad" else grad
    with amanda.apply(tool):
        step(W, X)
        step(W, X)
    times = {**TIMES, twice: 2}[program]
    assert len(handed) == 2 * times
    assert len(set(handed)) == (times if program is not scanned else 5)


def test_functions_of_jax_are_fused_as_without_a_tool_that_inserts_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(64, 129)).astype(np.float32)

    def run() -> list[bytes]:
        return [np.asarray(function(x)).tobytes() for function in (jnp.var, jax.nn.softmax, jnp.linalg.norm)]

    plain = run()
    with amanda.apply(Counting()):
        counted = run()
    empty = amanda.Tool()
    empty.add_inst_for_op(lambda context: None)
    with amanda.apply(empty):
        assert run() == plain
    assert len(counted) == len(plain)


@pytest.mark.parametrize("how", [jax.jit, lambda function: function])
def test_a_function_that_its_rule_calls_is_executed_once(how: Any) -> None:
    step, tool = how(jax.grad(lambda x: squared(squared(x)).sum())), Counting()
    with amanda.apply(tool):
        step(X)
    assert tool.forward["custom_jvp_call"] == tool.backward["custom_jvp_call_transpose"] == 2
    assert tool.forward["mul"] == 4


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, cotangent: (cosine * cotangent,))


@jax.custom_vjp
def halved(x: Any) -> Any:
    return sine(x) / 2


halved.defvjp(lambda x: (sine(x) / 2, x), lambda x, cotangent: (jnp.cos(x) * cotangent / 2,))

DERIVED: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "jit of grad of scan": lambda f: jax.jit(
        jax.grad(lambda x: lax.scan(lambda total, value: (total + f(value), None), 0.0, x[None])[0])
    ),
}


@pytest.mark.parametrize("how", DERIVED)
def test_ops_of_a_rule_for_values_and_tangents_are_seen_or_reported(how: str) -> None:
    step = DERIVED[how](lambda x: squared(x).sum())
    plain, tool = step(X), Counting()
    for _ in range(2):  # JAX calls the rule once
        with amanda.apply(tool) as scope:
            assert np.allclose(step(X), plain, rtol=1e-6)
        unseen = how in ("grad of jit", "jit of grad of checkpoint", "jit of grad of scan")
        assert [entry.what for entry in scope.report] == ["ops of the rule of squared"] * unseen


@pytest.mark.parametrize("how", DERIVED)
@pytest.mark.parametrize(
    ("function", "calls", "inside"),
    [(cubed, 1, {"mul": 2}), (sine, 1, {"sin": 1}), (halved, 2, {"sin": 1, "div": 1})],
    ids=["its rule calls it", "its rule computes", "its rule calls another"],
)
def test_what_a_function_with_a_rule_for_vjp_computes_is_seen_once(
    function: Callable[..., Any], calls: int, inside: dict[str, int], how: str
) -> None:
    step, tool = DERIVED[how](lambda x: function(x).sum()), Counting()
    plain = step(X)
    with amanda.apply(tool) as scope:
        assert np.allclose(step(X), plain, rtol=1e-6)
    by_rule = {"cos": 1} if function is sine and "grad" in how else {}
    expected = {"custom_vjp_call": calls, **inside, **by_rule}
    assert {op: tool.forward[op] for op in (*expected, "cos")} == {"cos": 0, **expected}
    assert tool.backward["custom_vjp_call_transpose"] == ("grad" in how)
    assert not list(scope.report)


def test_a_routine_at_an_op_of_a_forward_rule_alone_is_in_the_derivative_of_a_jitted_function() -> None:
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context.get_op_type() == "cos":
            context.insert_after_op(lambda value: value * 2)

    tool.add_inst_for_op(analyse)
    step = jax.grad(jax.jit(lambda x: sine(x).sum()))
    plain = step(X)
    with amanda.apply(tool):
        assert np.allclose(step(X), 2 * plain, rtol=1e-6)
    assert np.array_equal(step(X), plain)


def twofold(w: Any, x: Any) -> Any:
    return jax.vmap(jax.vmap(jnp.tanh))(x @ w).sum()


def rounds(w: Any, x: Any) -> Any:
    step = lambda carry, _: (jnp.tanh(carry @ w), None)  # noqa: E731
    return jax.vmap(lambda row: lax.scan(step, row, None, length=2)[0])(x).sum()


@pytest.mark.parametrize("how", ["jit of grad", "grad of jit", "grad"])
@pytest.mark.parametrize(("program", "rows"), [(mapped, 2), (twofold, 6), (rounds, 4)])
def test_routines_of_a_backward_op_under_vmap_share_run_by_row(
    program: Callable[..., Any], rows: int, how: str
) -> None:
    tool, handed = amanda.Tool(), []

    def before(gradient: Any, run: dict[str, Any]) -> None:
        run["sum"] = float(np.sum(gradient))

    def analyse(context: Any) -> None:
        if context.get_forward_op_type() == "tanh":
            context.insert_before_backward_op(before)
            context.insert_after_backward_op(lambda gradient, run: handed.append(run["sum"]))

    tool.add_inst_for_op(analyse, backward=True)
    step = DERIVED[how](lambda w: program(w, X))
    plain = step(W)
    with amanda.apply(tool):
        assert np.allclose(step(W), plain, rtol=1e-6)
    assert len(handed) == rows


@pytest.mark.parametrize("how", ["jit of grad", "grad of jit", "grad"])
@pytest.mark.parametrize("program", [dense, mapped, rounds])
def test_a_backward_op_is_replaced_in_every_program(program: Callable[..., Any], how: str) -> None:
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context.get_forward_op_type() == "tanh":
            context.replace_backward_op(lambda gradient: gradient * 0)

    tool.add_inst_for_op(analyse, backward=True)
    step = DERIVED[how](lambda w: program(w, X))
    plain = step(W)
    with amanda.apply(tool):
        assert not np.any(step(W))
    assert np.array_equal(step(W), plain)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_selected_gradient_that_is_not_there_is_an_error(wrap: Callable[..., Any]) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_before_backward_op(lambda g: g, grad_outputs=[3]), backward=True)
    with (
        pytest.raises(RoutineError, match=r"selects \[3\]; .* has 1 value here") as caught,
        amanda.apply(tool),
    ):
        wrap(jax.grad(dense))(W, X)
    assert "tool Tool, insert_before_backward_op(" in caught.value.__notes__[0]

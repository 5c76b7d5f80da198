"""Derivatives outside of jit have each bit of the bare program under tools that look."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amanda

X = jnp.linspace(-2.0, 2.0, 13)
V = jnp.cos(jnp.arange(13.0))


def f(x: Any) -> Any:
    return (jnp.tanh(x) * jnp.sin(x * x) + jax.nn.gelu(x) / (1 + x * x)).sum()


def g(x: Any) -> Any:
    return jax.nn.log_softmax(x * x) * jax.nn.silu(x) + jnp.var(x) * jnp.linalg.norm(x)


DERIVATIVES: dict[str, Callable[[], Any]] = {
    "jvp": lambda: jax.jvp(g, (X,), (V,)),
    "vjp": lambda: jax.vjp(g, X)[1](V),
    "linearize": lambda: jax.linearize(g, X)[1](V),
    "hvp": lambda: jax.jvp(jax.grad(f), (X,), (V,)),
    "vmap of grad": lambda: jax.vmap(jax.grad(lambda y: f(y * X)))(V),
    "grad of grad": lambda: jax.grad(lambda y: jax.grad(lambda z: f(z * X))(y) ** 2)(1.1),
    "value and grad": lambda: jax.value_and_grad(f)(X),
}


def looking(routine: Callable[..., Any] | None = None) -> amanda.Tool:
    tool = amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        context.get_inputs()
        if routine is not None:
            context.insert_before_op(routine)

    def backward(context: amanda.OpContext) -> None:
        context.get_grad_outputs()
        if routine is not None:
            context.insert_after_backward_op(routine)

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    return tool


def bits(run: Callable[[], Any]) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(run())]


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_tool_that_looks_leaves_each_bit_of_a_derivative(name: str) -> None:
    bare = bits(DERIVATIVES[name])
    with amanda.apply(looking()):
        assert bits(DERIVATIVES[name]) == bare


def test_a_tool_that_looks_leaves_each_bit_of_a_function_without_derivative() -> None:
    # Op by op, its loop rounds otherwise than in JAX's own program.
    matrix = jnp.array([[2.5017724, 0.8748705, 0.7054109], [0.8748705, 4.0625553, 1.6159753],
                        [0.7054109, 1.6159753, 3.582295]])  # fmt: skip
    bare = bits(lambda: jax.lax.linalg.qdwh(matrix))
    with amanda.apply(looking()):
        assert bits(lambda: jax.lax.linalg.qdwh(matrix)) == bare


@pytest.mark.parametrize("name", ["vjp", "value and grad"])
def test_routines_that_return_what_they_got_leave_each_bit_of_a_gradient(name: str) -> None:
    bare = bits(DERIVATIVES[name])
    with amanda.apply(looking(lambda *values: values if len(values) > 1 else values[0])):
        assert bits(DERIVATIVES[name]) == bare


def test_gradient_that_a_routine_changes_goes_on() -> None:
    tool = amanda.Tool()

    def double(context: amanda.OpContext) -> None:
        if context.get_forward_op_type() == "tanh":
            context.insert_after_backward_op(lambda gradient: gradient * 2)

    tool.add_inst_for_op(double, backward=True)
    gradient = jax.grad(lambda x: (jnp.tanh(x) * x).sum())
    with amanda.apply(tool):
        value = gradient(X)
    expected = 2 * (1 - jnp.tanh(X) ** 2) * X + jnp.tanh(X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert bits(lambda: gradient(X))  # outside of the scope


def test_each_pass_of_one_backward_function_decides_for_itself() -> None:
    tool = amanda.Tool()
    tool.factor = 2  # type: ignore[attr-defined]

    def double(context: amanda.OpContext) -> None:
        if context.get_forward_op_type() == "tanh":
            context.insert_after_backward_op(
                lambda gradient: gradient if tool.factor == 1 else gradient * tool.factor  # type: ignore[attr-defined]
            )

    tool.add_inst_for_op(double, backward=True)
    bare = jax.vjp(jnp.tanh, X)[1](V)[0]
    with amanda.apply(tool):
        _, pull = jax.vjp(jnp.tanh, X)
        np.testing.assert_allclose(pull(V)[0], 2 * bare, rtol=1e-5)
        tool.factor = 1  # type: ignore[attr-defined]
        np.testing.assert_array_equal(pull(V)[0], bare)


@pytest.mark.parametrize("look", [looking, lambda: looking(lambda *values: None)])
def test_functions_of_jax_are_given_fresh_arguments(look: Callable[[], amanda.Tool]) -> None:
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    q = jnp.linspace(-1, 1, 80).reshape(2, 5, 2, 4)
    calls: list[Callable[[], Any]] = [
        lambda: jnp.einsum("ij,jk->ik", a, b),
        lambda: jnp.einsum("ij,jk,kl->il", a, b, b.T),
        lambda: jax.grad(lambda a: jnp.einsum("ij,jk->ik", a, b).sum())(a),
        lambda: jax.nn.dot_product_attention(q, q, q),
        lambda: jnp.linalg.multi_dot([a, b, b.T]),
        lambda: jnp.add(np.ones(3, np.float32), 1),  # arrays of NumPy and numbers are arrays of JAX within
        lambda: jnp.where(np.array([True, False]), 1.0, 2),
    ]
    for call in calls:
        bare = bits(call)
        with amanda.apply(look()):
            assert bits(call) == bare


def loop(p: Any) -> Any:
    """Return a product with a number that a loop counts; the loop also sums parameters, for nothing."""

    def step(state: Any) -> Any:
        count, total = state
        return count + 1, total + p[0]

    count, _ = jax.lax.while_loop(lambda state: state[1] < 1, step, (0.0, 0.0))
    return count * p[1]


@pytest.mark.parametrize("routine", [lambda *values: None, lambda *values: values])
@pytest.mark.parametrize("name", ["grad", "jit", "jit of grad", "cond", "scan"])
def test_a_gradient_passes_by_a_loop_whose_derivative_nothing_reads(
    name: str, routine: Callable[..., Any]
) -> None:
    p = jnp.array([0.1, 0.2, 0.3])
    function: Callable[..., Any] = {
        "grad": jax.grad(loop),
        "jit": jax.grad(jax.jit(loop)),
        "jit of grad": jax.jit(jax.grad(loop)),
        "cond": jax.grad(lambda p: jax.lax.cond(p[2] > 0, loop, jnp.sum, p)),
        "scan": jax.grad(lambda p: jax.lax.scan(lambda s, _: (s + loop(p * s), None), p[2], None, 2)[0]),
    }[name]
    bare = function(p)
    with amanda.apply(looking(routine)):
        np.testing.assert_allclose(function(p), bare, rtol=1e-6)


@jax.custom_jvp
def projection(x: Any) -> Any:
    """Return twice the positive numbers."""
    return 2 * jnp.maximum(x, 0)


@projection.defjvp
def _(primals: Any, tangents: Any) -> Any:
    is_kept = (primals[0] > 0).astype(jnp.float32)
    return projection(primals[0]), is_kept * tangents[0] - is_kept * jnp.dot(is_kept, tangents[0]) / 3


@pytest.mark.parametrize("routine", [None, lambda *values: values[0] if len(values) == 1 else values])
@pytest.mark.parametrize("maps", [1, 2])
def test_ops_of_a_mapped_rule_for_tangents_are_not_ops(routine: Any, maps: int) -> None:
    x, function = jnp.array([0.1, -0.2, 0.3, 1.0, 2.0, -3.0]).reshape([1] * (maps - 1) + [2, 3]), projection
    for _ in range(maps):
        function = jax.vmap(function)
    for derivative in (
        jax.grad,
        lambda loss: jax.jit(jax.grad(loss)),
        lambda loss: jax.linearize(loss, x)[1],
    ):
        bare = derivative(lambda x: function(x).sum())(x)
        with amanda.apply(looking(routine)):
            np.testing.assert_allclose(derivative(lambda x: function(x).sum())(x), bare, rtol=1e-6)

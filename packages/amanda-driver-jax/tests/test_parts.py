"""Functions that are parts of a primitive are no ops: those of scatters, reductions and composites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.tools.flops import FlopsTool

pytestmark = pytest.mark.usefixtures("attached_driver")

X, IDS = jnp.arange(12.0).reshape(3, 4), jnp.array([0, 1, 0])


def windows(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lambda a, b: lax.add(a, b), (2, 2), (1, 1), "VALID")


def largest(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")


def pairs(x: Any) -> Any:
    return lax.reduce((x, x), (0.0, 0.0), lambda a, b: (lax.add(a[0], b[0]), lax.add(a[1], b[1])), (0,))[0]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x.at[0].add(1),
    "apply": lambda x: x.at[0].apply(lambda y: lax.add(y, y)),
    "multiply": lambda x: x.at[IDS, 1].multiply(2),
    "segment_sum": lambda x: jax.ops.segment_sum(x, IDS, 2),
    "reduce": lambda x: lax.reduce(x, 0.0, lambda a, b: lax.add(a, b), (0,)),
    "reduce of pairs": pairs,
    "reduce_window": windows,
    "gradient of max_pool": jax.grad(lambda x: (largest(x) * X[:2, :3]).sum()),
    "composite": lambda x: lax.composite(lambda y: lax.add(y, y), "my.double")(x),
}  # fmt: skip


@amanda.traceable
def doubled(value: Any) -> Any:
    return value * 2


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_primitives_are_left(name: str, how: Any) -> None:
    run = how(FUNCTIONS[name])
    plain = np.asarray(run(X))
    doubling, types = amanda.Tool(), set()

    def analyse(context: Any) -> None:
        types.add(context.get_op_type())
        if context.get_op_type() in ("add", "max", "mul") and np.ndim(context.get_inputs()[0]) == 0:
            context.insert_after_op(doubled)

    doubling.add_inst_for_op(analyse)
    looking = amanda.Tool()
    looking.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: None))
    for tool in (doubling, looking, FlopsTool()):
        with amanda.apply(tool):
            assert np.allclose(run(X), plain, rtol=1e-6)
    assert np.array_equal(run(X), plain)
    assert types


def test_what_a_partitioned_function_computes_is_reported() -> None:
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def doubling(x: Any) -> Any:
        return x * 2

    doubling.def_partition(
        partition=lambda mesh, inputs, output: (
            mesh,
            lambda x: x * 2,
            output.sharding,
            (inputs[0].sharding,),
        ),
        sharding_rule="i j -> i j",
    )
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: None))
    with amanda.apply(tool) as scope:
        assert np.array_equal(jax.jit(doubling)(X), X * 2)
    assert [entry.what for entry in scope.report] == ["inside of the partitioned doubling"]

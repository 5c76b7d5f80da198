"""Functions that are mapped over devices: outside of jit, under it, and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import amanda
from amanda.tools.nan import NanTool

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.linspace(0.1, 1.0, 4)


def mapped(x: Any) -> Any:
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec("d")
    return jax.shard_map(lambda x: jnp.tanh(jnp.log(x)), mesh=mesh, in_specs=spec, out_specs=spec)(x)


def total(x: Any) -> Any:
    return mapped(x).sum()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "outside of jit": mapped,
    "under jit": jax.jit(mapped),
    "gradient": jax.grad(total),
    "gradient under jit": jax.jit(jax.grad(total)),
    "tangents": lambda x: jax.jvp(mapped, (x,), (x,))[1],
    "rows": lambda x: jax.vmap(mapped)(jnp.stack([x, x])),
}


def looking() -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.get_inputs())
    tool.add_inst_for_op(lambda context: context.get_grad_outputs(), backward=True)
    return tool


@pytest.mark.parametrize("name", PROGRAMS)
def test_nan_in_a_mapped_function_is_found_at_its_op(name: str) -> None:
    tool = NanTool()
    with amanda.apply(tool) as scope:
        PROGRAMS[name](X - 0.5)
    assert tool.result.findings[0].type == "log"
    assert not list(scope.report)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tool_that_looks_leaves_each_bit_of_a_mapped_function(name: str) -> None:
    bare = PROGRAMS[name](X)
    with amanda.apply(looking()), jax.check_tracer_leaks():
        value = PROGRAMS[name](X)
    np.testing.assert_array_equal(value, bare)
    assert value.sharding == bare.sharding


@pytest.mark.parametrize("name", ["gradient", "gradient under jit"])
def test_gradient_in_a_mapped_function_is_changed(name: str) -> None:
    def double(context: Any) -> None:
        if context.get_forward_op_type() == "tanh":
            context.insert_after_backward_op(lambda gradient: gradient * np.float32(2))

    tool, bare = amanda.Tool(), PROGRAMS[name](X)
    tool.add_inst_for_op(double, backward=True)
    with amanda.apply(tool):
        value = PROGRAMS[name](X)
    np.testing.assert_allclose(value, 2 * bare, rtol=1e-5)

"""Values that NumPy has no type for pass routines as they are; other small types are read."""

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
from amanda.tools.nan import NanTool
from amanda.tools.stats import StatsTool

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.ones((3, 2))


def noise(row: Any) -> Any:
    key, noise_key = jax.random.split(jax.random.key(1))
    return jnp.where(jax.random.bernoulli(key, 0.5, row.shape), row, 0) + jax.random.normal(
        noise_key, row.shape
    )


def carried(row: Any) -> Any:
    def step(key: Any, _: Any) -> Any:
        key, noise_key = jax.random.split(key)
        return key, jax.random.normal(noise_key, ())

    return lax.scan(step, jax.random.key(0), None, length=2)[1] + row


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "eager": noise,
    "jit": jax.jit(noise),
    "vmap": jax.vmap(noise),
    "jit of vmap": jax.jit(jax.vmap(noise)),
    "hessian": jax.hessian(lambda x: (noise(x) ** 2).sum()),
    "carried": jax.jit(jax.vmap(carried)),
}


def echo(observing: bool) -> amanda.Tool:
    tool = amanda.Tool()
    routine = amanda.observer(lambda *values: None) if observing else lambda *values: values
    tool.add_inst_for_op(lambda context: context.insert_before_op(routine))
    tool.add_inst_for_op(lambda context: context.insert_after_op(routine))
    return tool


@pytest.mark.parametrize("name", PROGRAMS)
def test_keys_pass_routines(name: str) -> None:
    program = PROGRAMS[name]
    plain = np.asarray(program(X))
    for tool in (echo(True), echo(False), NanTool()):
        with amanda.apply(tool):
            assert np.allclose(program(X), plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [FlopsTool, StatsTool])
@pytest.mark.parametrize("name", PROGRAMS)
def test_tools_run_programs_with_keys(name: str, tool: Callable[[], amanda.Tool]) -> None:
    program = PROGRAMS[name]
    plain = np.asarray(program(X))
    with amanda.apply(tool()):
        assert np.allclose(program(X), plain, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float4_e2m1fn"]
)
def test_small_types_are_read_in_programs(dtype: str) -> None:
    x, dtypes = jnp.ones(4, dtype), []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_op(lambda *values: dtypes.append(values[0].dtype) or values)
    )
    step = jax.jit(lambda x: lax.rev(x, (0,)))
    with amanda.apply(tool):
        result = step(x)
    assert dtypes == [x.dtype]
    assert np.asarray(result).tobytes() == np.asarray(x).tobytes()


def test_gradients_of_integers_pass_routines() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *values: values), backward=True
    )
    gradient = jax.jit(jax.grad(lambda x, i: (x[i] * 2).sum()))
    plain = gradient(X, jnp.array([0, 2]))
    with amanda.apply(tool):
        assert np.array_equal(gradient(X, jnp.array([0, 2])), plain)


def test_a_key_that_a_callback_returns_anew_is_an_error() -> None:
    tool = amanda.Tool()

    def analyse(context: Any) -> None:
        if context.get_op_type() == "random_bits":
            context.insert_before_op(lambda key: jax.random.key(3))

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool), pytest.raises(amanda.AmandaError, match="another value for one of dtype key"):
        jax.jit(lambda x: x + jax.random.normal(jax.random.key(0), x.shape))(X)


def test_an_exception_of_a_routine_under_vmap_is_itself() -> None:
    def fail(*values: Any) -> None:
        raise ZeroDivisionError("in the routine")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(fail))
    with amanda.apply(tool), pytest.raises(ZeroDivisionError, match="in the routine"):
        jax.vmap(lambda x: lax.sin(x))(X)

"""Programs that were traced apart and are evaluated in a scope: each op in them is seen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import amanda

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.linspace(0.1, 1.0, 3)
Function = Callable[[Any], Any]


def evaluated(function: Function) -> Function:
    return lambda x: jax.core.eval_jaxpr(jax.make_jaxpr(function)(x).jaxpr, [], x)[0]


def interpreted(function: Function) -> Function:
    """Return a function whose program is run by an interpreter that is none of JAX's."""

    def run(x: Any) -> Any:
        program = jax.make_jaxpr(function)(x).jaxpr
        values = dict(zip(program.invars, [x], strict=True))
        for equation in program.eqns:
            inputs = [values[i] if type(i) is not Literal else i.val for i in equation.invars]
            results = equation.primitive.bind(*inputs, **equation.params)
            values |= zip(
                equation.outvars, results if equation.primitive.multiple_results else [results], strict=True
            )
        return values[program.outvars[0]]

    return run


def converted(function: Function) -> Function:
    return lambda x: jax.closure_convert(function, x)[0](x)


def scanned(sin: Function, x: Any) -> Any:
    return lax.scan(lambda carry, _: (sin(carry), None), x, None, length=2)[0]


def looped(sin: Function, x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, sin(s[1])), (0, x))[1]


def branched(sin: Function, x: Any) -> Any:
    return lax.cond(x.sum() > 0, sin, lambda x: x, x)


def nested(sin: Function, x: Any) -> Any:
    def body(state: Any) -> Any:
        return state[0] + 1, eqxi.while_loop(
            lambda s: s[0] < 2,
            lambda s: (s[0] + 1, sin(s[1])),
            (0, state[1]),
            max_steps=4,
            kind="checkpointed",
        )[1]

    return eqxi.while_loop(lambda s: s[0] < 2, body, (0, x), max_steps=4, kind="checkpointed")[1]


PROGRAMS: dict[str, Callable[[Function, Any], Any]] = {
    "function": lambda sin, x: evaluated(sin)(x),
    "function under jit": lambda sin, x: evaluated(jax.jit(sin))(x),
    "scan": lambda sin, x: evaluated(lambda x: scanned(sin, x))(x),
    "mapped scan": lambda sin, x: evaluated(jax.vmap(lambda x: scanned(sin, x)))(x),
    "while": lambda sin, x: evaluated(lambda x: looped(sin, x))(x),
    "cond": lambda sin, x: evaluated(lambda x: branched(sin, x))(x),
    "checkpoint": lambda sin, x: evaluated(jax.checkpoint(sin))(x),
    "function under jit in an interpreter": lambda sin, x: interpreted(jax.jit(sin))(x),
    "scan in an interpreter": lambda sin, x: interpreted(lambda x: scanned(sin, x))(x),
    "closure_convert": lambda sin, x: converted(sin)(x),
    "scan in closure_convert": lambda sin, x: converted(lambda x: scanned(sin, x))(x),
    "loops of Equinox": nested,
}


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_op_of_an_evaluated_program_is_changed_once(name: str, how: Any) -> None:
    def double(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            context.insert_after_op(lambda value: value * np.float32(2))

    tool, program = amanda.Tool(), PROGRAMS[name]
    tool.add_inst_for_op(double)
    run = how(lambda x: program(jnp.sin, x))
    bare = run(X)
    with amanda.apply(tool):
        value = run(X)
    np.testing.assert_allclose(value, how(lambda x: program(lambda x: jnp.sin(x) * 2, x))(X), rtol=1e-5)
    np.testing.assert_array_equal(run(X), bare)


def test_program_that_was_traced_before_the_scope_is_seen() -> None:
    program, ops = jax.make_jaxpr(lambda x: scanned(jnp.sin, x))(X), []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: ops.append(context.get_op_type()))
    with amanda.apply(tool):
        jax.jit(lambda x: jax.core.eval_jaxpr(program.jaxpr, program.consts, x))(X)
    assert ops == ["sin"]

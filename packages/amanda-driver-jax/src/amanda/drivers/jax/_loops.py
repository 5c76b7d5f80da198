"""Loops whose condition calls Python, for which JAX has no form that can be mapped over."""

from typing import Any

import jax
from jax._src import core

from ._primitives import CALLBACKS


def calls_in_condition(name: str, params: dict[str, Any]) -> bool:
    """Return True for a loop whose condition has routines in Python in it."""
    return name == "while" and CALLBACKS in params["cond_jaxpr"].effects


def run_loop(
    *args: Any, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int
) -> Any:
    """Run a loop that carries what its condition gives, as each round computes it for the next.

    JAX writes such a loop likewise, but only when it compiles, without the choice by row of a loop that is mapped over.
    """
    condition, body = core.jaxpr_as_fun(cond_jaxpr), core.jaxpr_as_fun(body_jaxpr)

    def run(*args: Any) -> Any:
        cond_consts = args[:cond_nconsts]
        body_consts, carry = args[cond_nconsts:][:body_nconsts], args[cond_nconsts + body_nconsts :]

        def round_(state: Any) -> Any:
            carry = body(*body_consts, *state[1])
            return condition(*cond_consts, *carry)[0], carry

        state = condition(*cond_consts, *carry)[0], list(carry)
        return jax.lax.while_loop(lambda state: state[0], round_, state)[1]

    return jax.jit(run)(*args)

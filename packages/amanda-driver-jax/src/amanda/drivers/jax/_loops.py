"""Primitives that run in another form: loops with routines in the condition, and `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core

from ._contexts import without_tools
from ._primitives import CALLBACKS
from ._traces import TAP, collecting_notes, is_within_jit
from ._twins import is_differentiable, run_twice, wants_backward


def calls_in_condition(name: str, params: dict[str, Any]) -> bool:
    """Return True for a loop whose condition has routines in Python in it."""
    return name == "while" and CALLBACKS in params["cond_jaxpr"].effects


def run_loop(*args: Any, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int) -> Any:
    """Run a loop that carries the value of its condition, which each round computes for the next.

    So the condition, with its routines, is computed in the body. JAX rewrites such a loop likewise, but only
    when it compiles, and without the choice by row that a loop under vmap needs.
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


def run_mapped(bind: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a function that is mapped over devices as a program under jit, for the tools.

    Otherwise JAX runs each op in an executable of its own, and takes derivatives of the traced program.
    bind: binds `shard_map` without the tools; its results are returned.
    """
    form: Any = None

    def function() -> list[Any]:
        nonlocal form
        with without_tools():
            form = bind(*args, **params)
        return list(form.vals)

    def program(*args: Any) -> list[Any]:
        nonlocal form
        mapped = bind(*args, **params)
        form = mapped.update([None] * len(mapped.vals))  # no symbol may be held after the trace
        return list(mapped.vals)

    def ops(values: Sequence[Any]) -> list[Any]:
        with collecting_notes() as notes:
            results = jax.jit(program)(*values)
            if not any(map(is_differentiable, values)):  # no backward pass will come to the program
                notes.pop(TAP, None)
        return list(results)

    results = ops(args) if is_within_jit() else run_twice(args, function, ops, wants_backward())
    return form.update(results)

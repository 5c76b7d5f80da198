"""Evaluation of programs that were traced apart, as by `jax.make_jaxpr` and loops of Equinox.

JAX binds their ops one by one.  Loops and functions within them come as programs: those that were traced
without the tools are traced anew.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

import jax
from jax._src import ad_checkpoint, core, pjit

_EVALUATES = core.eval_jaxpr.__code__
_PASSES_ON = ad_checkpoint.remat_p.bind.__code__
_PREFIX = "amanda_"
_ROUTINES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_FUNCTIONS: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
Program = Callable[..., Sequence[Any]]

APART = "it was traced apart, and its form is not known: call the function itself"


def evaluated(frame: FrameType) -> Any:
    """Return the program that the caller of `bind` evaluates op by op; None for another caller."""
    if frame.f_code is _PASSES_ON and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_locals["jaxpr"] if frame.f_code is _EVALUATES else None


def holds_routines(program: Any) -> bool:
    """Return True for a program that was traced for tools, so that routines are in it."""
    if program not in _ROUTINES:
        _ROUTINES[program] = any(one.primitive.name.startswith(_PREFIX) for one in program.eqns) or any(
            map(holds_routines, core.subjaxprs(program))
        )
    return _ROUTINES[program]


def has_programs(params: dict[str, Any]) -> bool:
    """Return True for parameters of a primitive in which there are programs."""
    return next(core.jaxprs_in_params(params), None) is not None


def traced_anew(name: str, params: dict[str, Any]) -> Program | None:
    """Return a function that runs a loop, branches or a function as JAX's own functions do.

    None for what has another form, and for what has routines in it.
    """
    if any(map(holds_routines, core.jaxprs_in_params(params))) or name not in _FORMS:
        return None
    return _FORMS[name](**params)


def _function(program: Any) -> Callable[..., Any]:
    """Return a program as a function: the same one each time, for JAX's caches."""
    if program not in _FUNCTIONS:
        reference = weakref.ref(program)

        def function(*args: Any) -> Any:
            closed: Any = reference()
            if isinstance(closed, core.Jaxpr):
                return core.eval_jaxpr(closed, (), *args)
            return core.jaxpr_as_fun(closed)(*args)

        _FUNCTIONS[program] = function
    return _FUNCTIONS[program]


def _scan(
    *, jaxpr: Any, num_consts: int, num_carry: int, length: int, reverse: bool, unroll: int, **_: Any
) -> Program:
    body = _function(jaxpr)

    def run(*args: Any) -> Sequence[Any]:
        consts, carry, xs = (
            args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
        )  # fmt: skip

        def round_(carry: Any, slices: Any) -> Any:
            results = body(*consts, *carry, *slices)
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        carry, ys = jax.lax.scan(round_, carry, xs, length, reverse=reverse, unroll=unroll)
        return [*carry, *ys]

    return run


def _while(*, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int) -> Program:
    condition, body = _function(cond_jaxpr), _function(body_jaxpr)

    def run(*args: Any) -> Sequence[Any]:
        count = cond_nconsts + body_nconsts
        cond_consts, body_consts, carry = args[:cond_nconsts], args[cond_nconsts:count], args[count:]
        return jax.lax.while_loop(
            lambda carry: condition(*cond_consts, *carry)[0],
            lambda carry: tuple(body(*body_consts, *carry)),
            tuple(carry),
        )

    return run


def _cond(*, branches: Sequence[Any], **_: Any) -> Program:
    return lambda index, *operands: jax.lax.switch(index, list(map(_function, branches)), *operands)


@cache
def _checkpointed(function: Callable[..., Any], prevent_cse: Any, policy: Any) -> Program:
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)  # type: ignore[no-any-return]


def _checkpoint(*, jaxpr: Any, prevent_cse: Any, differentiated: bool, policy: Any) -> Program | None:
    return (
        None
        if differentiated or not isinstance(prevent_cse, bool)
        else _checkpointed(_function(jaxpr), prevent_cse, policy)
    )


def _jit(*, jaxpr: Any, **params: Any) -> Program | None:
    placed = (params["in_shardings"], params["out_shardings"])
    if any(one is not pjit.UNSPECIFIED for several in placed for one in several) or any(
        params["donated_invars"]
    ):
        return None
    return _jitted(_function(jaxpr), params["name"])


@cache
def _jitted(function: Callable[..., Any], name: str) -> Program:
    function.__name__ = name
    return jax.jit(function)  # type: ignore[no-any-return]


_FORMS: dict[str, Callable[..., Program | None]] = {
    "scan": _scan, "while": _while, "cond": _cond, "checkpoint": _checkpoint, "remat2": _checkpoint,
    "jit": _jit, "pjit": _jit,
}  # fmt: skip

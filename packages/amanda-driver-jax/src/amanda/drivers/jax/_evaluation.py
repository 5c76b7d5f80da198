"""Evaluation of programs that were traced apart, as by `jax.make_jaxpr` and loops of Equinox.

JAX binds their ops one by one.  Loops and functions within them come as programs: those that were traced
without the tools are traced anew.
"""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax._src import ad_checkpoint, core, pjit

_EVALUATES = core.eval_jaxpr.__code__
_PASSES_ON = ad_checkpoint.remat_p.bind.__code__
_PREFIX = "amanda_"
_JAX = str(Path(jax.__file__).parent)
_ROUTINES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_FUNCTIONS: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
Program = Callable[..., Sequence[Any]]

APART = "it was traced apart, and its form is not known: call the function itself"


def caller_of_bind(frame: FrameType) -> FrameType:
    """Return the frame that binds a primitive, which a function of JAX may pass on."""
    return frame.f_back if frame.f_code is _PASSES_ON and frame.f_back is not None else frame


def evaluated(frame: FrameType) -> Any:
    """Return the program that a frame evaluates op by op; None for another frame."""
    return frame.f_locals["jaxpr"] if frame.f_code is _EVALUATES else None


def holds_routines(program: Any) -> bool:
    """Return True for a program that was traced for tools, so that routines are in it."""
    if program not in _ROUTINES:
        _ROUTINES[program] = any(
            equation.primitive.name.startswith(_PREFIX) for equation in program.eqns
        ) or any(map(holds_routines, core.subjaxprs(program)))
    return _ROUTINES[program]


def was_traced_apart(frame: FrameType, params: dict[str, Any]) -> bool:
    """Return True if the programs in parameters of a primitive come of another program, without the tools.

    frame: of the caller of `bind`: an evaluation by JAX, or an interpreter of programs that is none of JAX's.
    """
    programs = list(core.jaxprs_in_params(params))
    if not programs or any(map(holds_routines, programs)):
        return False
    return evaluated(frame) is not None or not frame.f_code.co_filename.startswith(_JAX)


def traced_anew(name: str, params: dict[str, Any]) -> Program | None:
    """Return a function that runs a loop, branches or a function as JAX's own do; None for others."""
    return _FORMS[name](**params) if name in _FORMS else None


def _as_it_is(function: Program) -> Program:
    return function


def _checkpointed(function: Program, prevent_cse: bool, policy: Any) -> Program:
    checkpointed: Program = jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)
    return checkpointed


def _jitted(function: Program, name: str) -> Program:
    function.__name__ = name
    jitted: Program = jax.jit(function)
    return jitted


def _function(program: Any, form: Callable[..., Any] = _as_it_is, *options: Any) -> Callable[..., Any]:
    """Return a program as a function, in a form: one as long as the program lives, for JAX's caches."""
    functions = _FUNCTIONS.setdefault(program, {})
    if (form, options) not in functions:
        reference = weakref.ref(program)

        def function(*args: Any) -> Any:
            closed: Any = reference()
            if isinstance(closed, core.Jaxpr):
                return core.eval_jaxpr(closed, (), *args)
            return core.jaxpr_as_fun(closed)(*args)

        functions[form, options] = form(function, *options)
    return functions[form, options]


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
        results: Sequence[Any] = jax.lax.while_loop(
            lambda carry: condition(*cond_consts, *carry)[0],
            lambda carry: tuple(body(*body_consts, *carry)),
            tuple(carry),
        )
        return results

    return run


def _cond(*, branches: Sequence[Any], **_: Any) -> Program:
    return lambda index, *operands: jax.lax.switch(index, list(map(_function, branches)), *operands)


def _checkpoint(*, jaxpr: Any, prevent_cse: Any, differentiated: bool, policy: Any) -> Program | None:
    if differentiated or not isinstance(prevent_cse, bool):
        return None
    return _function(jaxpr, _checkpointed, prevent_cse, policy)


def _jit(*, jaxpr: Any, **params: Any) -> Program | None:
    shardings = (*params["in_shardings"], *params["out_shardings"])
    if any(sharding is not pjit.UNSPECIFIED for sharding in shardings) or any(params["donated_invars"]):
        return None
    return _function(jaxpr, _jitted, params["name"])


_FORMS: dict[str, Callable[..., Program | None]] = {
    "scan": _scan, "while": _while, "cond": _cond, "checkpoint": _checkpoint, "remat2": _checkpoint,
    "jit": _jit, "pjit": _jit,
}  # fmt: skip

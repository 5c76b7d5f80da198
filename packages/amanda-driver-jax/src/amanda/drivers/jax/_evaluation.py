"""Programs that run in another form for the tools: programs that were traced apart, loops, mapped functions.

JAX binds the ops of a program that was traced without the tools, as by `jax.make_jaxpr`, one by one. Loops
and functions within it are programs themselves, and are traced anew for the tools.
"""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax._src import pjit
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params, subjaxprs
from jax.extend.core.primitives import remat_p

from ._contexts import without_tools
from ._primitives import CALLBACKS
from ._traces import is_within_jit
from ._twins import run_twice, wants_backward

# JAX does not tell a primitive who binds it, so the code of the calling frame is compared.
_EVALUATION_CODE = jax.core.eval_jaxpr.__code__
_REMAT_CODE = remat_p.bind.__code__
_PREFIX = "amanda_"
_JAX = str(Path(jax.__file__).parent)
_ROUTINES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_FUNCTIONS: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
ProgramFunction = Callable[..., Sequence[Any]]

TRACED_APART = "it was traced apart, and its form is not known: call the function itself"


def caller_of_bind(frame: FrameType) -> FrameType:
    """Return the frame that binds a primitive, which a function of JAX may pass on."""
    return frame.f_back if frame.f_code is _REMAT_CODE and frame.f_back is not None else frame


def evaluated_program(frame: FrameType) -> Any:
    """Return the program that a frame evaluates op by op; None for another frame."""
    return frame.f_locals["jaxpr"] if frame.f_code is _EVALUATION_CODE else None


def holds_routines(program: Any) -> bool:
    """Return True for a program that was traced for tools, so that routines are in it."""
    # Cached by the program, since the look goes through all equations, and programs within them.
    if program not in _ROUTINES:
        _ROUTINES[program] = any(
            equation.primitive.name.startswith(_PREFIX) for equation in program.eqns
        ) or any(map(holds_routines, subjaxprs(program)))
    return _ROUTINES[program]


def was_traced_apart(frame: FrameType, params: dict[str, Any]) -> bool:
    """Return True if the programs in a primitive's parameters were traced without the tools.

    frame: of the caller of `bind`: an evaluation by JAX, or an interpreter that is not JAX's.
    """
    programs = list(jaxprs_in_params(params))
    if not programs or any(map(holds_routines, programs)):
        return False
    return evaluated_program(frame) is not None or not frame.f_code.co_filename.startswith(_JAX)


def retracing_function(name: str, params: dict[str, Any]) -> ProgramFunction | None:
    """Return a function that runs a loop, branches or a function by JAX's public API; None for others."""
    if name not in _RETRACERS:
        return None
    try:
        return _RETRACERS[name](**params)
    except (TypeError, KeyError):  # this JAX gives the primitive other parameters
        return None


def _unchanged(function: ProgramFunction) -> ProgramFunction:
    return function


def _checkpointed(function: ProgramFunction, prevent_cse: bool, policy: Any) -> ProgramFunction:
    checkpointed: ProgramFunction = jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)
    return checkpointed


def _jitted(function: ProgramFunction, name: str) -> ProgramFunction:
    function.__name__ = name
    jitted: ProgramFunction = jax.jit(function)
    return jitted


def _as_function(program: Any, form: Callable[..., Any] = _unchanged, *options: Any) -> Callable[..., Any]:
    """Return a program as a function, after `form` has wrapped it.

    There is one function as long as the program lives, so that JAX's caches find it.
    """
    # Weakly by the program, and from the function to the program too: neither keeps the other alive.
    functions = _FUNCTIONS.setdefault(program, {})
    if (form, options) not in functions:
        reference = weakref.ref(program)

        def function(*args: Any) -> Any:
            closed: Any = reference()
            if not hasattr(closed, "consts"):  # before JAX 0.12, a program without its constants
                return jax.core.eval_jaxpr(closed, (), *args)
            return jaxpr_as_fun(closed)(*args)

        functions[form, options] = form(function, *options)
    return functions[form, options]


def _retraced_scan(*, jaxpr: Any, length: int, reverse: bool, unroll: int, **params: Any) -> ProgramFunction:
    """Return a function that runs the program of a scan by `jax.lax.scan`."""
    body = _as_function(jaxpr)
    if "ft_in" in params:  # since JAX 0.11
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]

    def run(*args: Any) -> Sequence[Any]:
        consts, carry, xs = (
            args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
        )  # fmt: skip

        def run_round(carry: Any, slices: Any) -> Any:
            results = body(*consts, *carry, *slices)
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        carry, ys = jax.lax.scan(run_round, carry, xs, length, reverse=reverse, unroll=unroll)
        return [*carry, *ys]

    return run


def _retraced_while(
    *, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int
) -> ProgramFunction:
    """Return a function that runs the programs of a loop by `jax.lax.while_loop`."""
    condition, body = _as_function(cond_jaxpr), _as_function(body_jaxpr)

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


def _retraced_cond(*, branches: Sequence[Any], **_: Any) -> ProgramFunction:
    return lambda index, *operands: jax.lax.switch(index, list(map(_as_function, branches)), *operands)


def _retraced_checkpoint(
    *, jaxpr: Any, prevent_cse: Any, differentiated: bool, policy: Any
) -> ProgramFunction | None:
    """Return a function that runs the program of a checkpoint by `jax.checkpoint`."""
    if differentiated or not isinstance(prevent_cse, bool):  # forms that `jax.checkpoint` cannot express
        return None
    return _as_function(jaxpr, _checkpointed, prevent_cse, policy)


def _retraced_jit(*, jaxpr: Any, **params: Any) -> ProgramFunction | None:
    """Return a function that runs the program of a jitted function by `jax.jit`."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    # `jax.jit` of the program would lose placements and donations: the program runs as it is, reported.
    if any(sharding is not pjit.UNSPECIFIED for sharding in shardings) or any(params["donated_invars"]):
        return None
    return _as_function(jaxpr, _jitted, params["name"])


_RETRACERS: dict[str, Callable[..., ProgramFunction | None]] = {
    "scan": _retraced_scan,
    "while": _retraced_while,
    "cond": _retraced_cond,
    "checkpoint": _retraced_checkpoint,
    "remat2": _retraced_checkpoint,
    "jit": _retraced_jit,
    "pjit": _retraced_jit,
}


def calls_in_condition(name: str, params: dict[str, Any]) -> bool:
    """Return True for a loop whose condition has routines in Python in it."""
    return name == "while" and CALLBACKS in params["cond_jaxpr"].effects


def run_loop(*args: Any, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int) -> Any:
    """Run a loop that carries the value of its condition, which each round computes for the next.

    So the condition, with its routines, is computed in the body. JAX rewrites such a loop likewise, but only
    when it compiles, and without the choice by row that a loop under vmap needs.
    """
    condition, body = jaxpr_as_fun(cond_jaxpr), jaxpr_as_fun(body_jaxpr)

    def run(*args: Any) -> Any:
        cond_consts = args[:cond_nconsts]
        body_consts, carry = args[cond_nconsts:][:body_nconsts], args[cond_nconsts + body_nconsts :]

        def run_round(state: Any) -> Any:
            _, carry = state
            results = body(*body_consts, *carry)
            return condition(*cond_consts, *results)[0], results

        first_state = condition(*cond_consts, *carry)[0], list(carry)
        _, final_carry = jax.lax.while_loop(lambda state: state[0], run_round, first_state)
        return final_carry

    return jax.jit(run)(*args)


def run_mapped(bind: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a function that is mapped over devices as a program under jit, for the tools.

    Otherwise JAX runs each op in an executable of its own, and takes derivatives of the traced program.
    bind: binds `shard_map` without the tools; its results are returned.
    """
    form: Any = None

    def function() -> list[Any]:
        """Bind without the tools, as the user's program does; return the results' values."""
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
        """Run the mapped function as a program under jit, for the tools; return the results' values."""
        return list(jax.jit(program)(*values))

    results = ops(args) if is_within_jit() else run_twice(args, function, ops, wants_backward())
    return form.update(results)

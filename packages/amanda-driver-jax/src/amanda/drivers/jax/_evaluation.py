"""Programs (jaxprs) that run in another form for the tools: traced without tools, loops, mapped functions.

JAX binds the ops of a program that was traced apart, without the tools, as by `jax.make_jaxpr`, one by one.
Loops and functions within it are programs themselves, and are traced anew for the tools.
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
_HAS_ROUTINES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_FUNCTIONS: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
"""Functions that run a program, for each program by wrapper and the wrapper's options."""
ProgramFunction = Callable[..., Sequence[Any]]

TRACED_APART = "it was traced apart, and its form is not known: call the function itself"


def caller_of_bind(frame: FrameType) -> FrameType:
    """Return the frame that binds a primitive, which a function of JAX may pass on."""
    return frame.f_back if frame.f_code is _REMAT_CODE and frame.f_back is not None else frame


def evaluated_program(frame: FrameType) -> Any:
    """Return the program that a frame evaluates op by op; None for another frame."""
    return frame.f_locals["jaxpr"] if frame.f_code is _EVALUATION_CODE else None


def holds_routines(program: Any) -> bool:
    """Return True for a program that was traced for tools: Amanda's primitives are in it, or in its parts."""
    # Cached by the program, since the look goes through all equations, and programs within them.
    if program not in _HAS_ROUTINES:
        _HAS_ROUTINES[program] = any(
            equation.primitive.name.startswith(_PREFIX) for equation in program.eqns
        ) or any(map(holds_routines, subjaxprs(program)))
    return _HAS_ROUTINES[program]


def was_traced_apart(frame: FrameType, params: dict[str, Any]) -> bool:
    """Return True if the programs in a primitive's parameters were traced before, without the tools.

    frame: of the caller of `bind`, which shows it: JAX's evaluation of a program, or a user's interpreter.
    """
    programs = list(jaxprs_in_params(params))
    if not programs or any(map(holds_routines, programs)):
        return False
    return evaluated_program(frame) is not None or not frame.f_code.co_filename.startswith(_JAX)


def retracing_function(name: str, params: dict[str, Any]) -> ProgramFunction | None:
    """Return a function that runs a program by JAX's public API, which traces it anew; None if it cannot."""
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


def _program_function(
    program: Any, wrapper: Callable[..., Any] = _unchanged, *options: Any
) -> Callable[..., Any]:
    """Return `wrapper(function, *options)` of a function that runs a program.

    The result is the same as long as the program lives, so that JAX's caches find it.
    """
    # Weakly by the program, and from the function to the program too: neither keeps the other alive.
    functions = _FUNCTIONS.setdefault(program, {})
    if (wrapper, options) not in functions:
        reference = weakref.ref(program)

        def run_program(*args: Any) -> Any:
            """Evaluate the program, in the form that this JAX has for it; return the list of results."""
            program: Any = reference()
            if not hasattr(program, "consts"):  # before JAX 0.12, a program without its constants
                return jax.core.eval_jaxpr(program, (), *args)
            return jaxpr_as_fun(program)(*args)

        functions[wrapper, options] = wrapper(run_program, *options)
    return functions[wrapper, options]


def _retraced_scan(*, jaxpr: Any, length: int, reverse: bool, unroll: int, **params: Any) -> ProgramFunction:
    """Return a function that runs the program of a scan by `jax.lax.scan`."""
    body = _program_function(jaxpr)
    if "ft_in" in params:  # since JAX 0.11, trees of the arguments instead of their numbers
        const_count, carry_count, _ = map(len, params["ft_in"].unpack())
    else:
        const_count, carry_count = params["num_consts"], params["num_carry"]

    def run_scan(*args: Any) -> Sequence[Any]:
        """Scan over the flat arguments; return the final carry and the stacked results as one list."""
        consts, carry_and_xs = args[:const_count], args[const_count:]

        def run_round(carry: Any, slices: Any) -> Any:
            results = body(*consts, *carry, *slices)
            return tuple(results[:carry_count]), tuple(results[carry_count:])

        carry, ys = jax.lax.scan(
            run_round, carry_and_xs[:carry_count], carry_and_xs[carry_count:], length,
            reverse=reverse, unroll=unroll,
        )  # fmt: skip
        return [*carry, *ys]

    return run_scan


def _retraced_while(
    *, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int
) -> ProgramFunction:
    """Return a function that runs the programs of a loop by `jax.lax.while_loop`."""
    condition, body = _program_function(cond_jaxpr), _program_function(body_jaxpr)

    def run_while(*args: Any) -> Sequence[Any]:
        """Run the loop on the flat arguments: constants of condition and body, then the carry."""
        cond_consts, other_args = args[:cond_nconsts], args[cond_nconsts:]
        body_consts, carry = other_args[:body_nconsts], other_args[body_nconsts:]
        results: Sequence[Any] = jax.lax.while_loop(
            lambda carry: condition(*cond_consts, *carry)[0],  # a program returns a list, here of one
            lambda carry: tuple(body(*body_consts, *carry)),
            tuple(carry),
        )
        return results

    return run_while


def _retraced_cond(*, branches: Sequence[Any], **_: Any) -> ProgramFunction:
    return lambda index, *operands: jax.lax.switch(index, list(map(_program_function, branches)), *operands)


def _retraced_checkpoint(
    *, jaxpr: Any, prevent_cse: Any, differentiated: bool, policy: Any
) -> ProgramFunction | None:
    """Return a function that runs the program of a checkpoint by `jax.checkpoint`; None if that cannot."""
    if differentiated or not isinstance(prevent_cse, bool):
        return None
    return _program_function(jaxpr, _checkpointed, prevent_cse, policy)


def _retraced_jit(*, jaxpr: Any, **params: Any) -> ProgramFunction | None:
    """Return a function that runs the program of a jitted function by `jax.jit`, unless options are lost."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    if any(sharding is not pjit.UNSPECIFIED for sharding in shardings) or any(params["donated_invars"]):
        return None
    return _program_function(jaxpr, _jitted, params["name"])


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
    """Run a while loop whose condition calls Python: each round computes the condition for the next round.

    So the condition, with its routines, is computed in the body. JAX rewrites such a loop likewise, but only
    when it compiles, and without the choice by row that a loop under vmap needs.
    """
    condition, body = jaxpr_as_fun(cond_jaxpr), jaxpr_as_fun(body_jaxpr)

    def run(*args: Any) -> Any:
        """Run the loop with the condition's result ahead of the carry; return the final carry."""
        cond_consts, other_args = args[:cond_nconsts], args[cond_nconsts:]
        body_consts, carry = other_args[:body_nconsts], list(other_args[body_nconsts:])

        def may_go_on(carry: Any) -> Any:
            (result,) = condition(*cond_consts, *carry)
            return result

        def run_round(state: Any) -> Any:
            """Compute the next carry, and from it whether another round follows."""
            _, carry = state
            next_carry = body(*body_consts, *carry)
            return may_go_on(next_carry), next_carry

        _, final_carry = jax.lax.while_loop(lambda state: state[0], run_round, (may_go_on(carry), carry))
        return final_carry

    return jax.jit(run)(*args)


def run_mapped(bind: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a function that is mapped over devices as a program under jit, for the tools.

    Outside of jit JAX's own run comes beside it, and its results count if no routine changed a value.
    Otherwise JAX runs each op in an executable of its own, and takes derivatives of the traced program.
    bind: JAX's bind of `shard_map`.  Returns results like those of `bind`.
    """
    # JAX's flat tree of the results: `vals` are its leaves, `update` returns the tree with other leaves.
    result_tree: Any = None

    def run_untapped() -> list[Any]:
        """Bind without the tools, as the user's program does; return the results' leaves."""
        nonlocal result_tree
        with without_tools():
            result_tree = bind(*args, **params)
        return list(result_tree.vals)

    def trace_mapped(*args: Any) -> list[Any]:
        """Bind as the program is traced; record the tree of the results, and return its leaves."""
        nonlocal result_tree
        results = bind(*args, **params)
        result_tree = results.update([None] * len(results.vals))  # no symbol may be held after the trace
        return list(results.vals)

    def run_for_tools(inputs: Sequence[Any]) -> list[Any]:
        """Run the mapped function as a program under jit, for the tools; return the results' leaves."""
        return list(jax.jit(trace_mapped)(*inputs))

    if is_within_jit():
        leaves = run_for_tools(args)
    else:
        leaves = run_twice(args, run_untapped, run_for_tools, wants_backward())
    return result_tree.update(leaves)

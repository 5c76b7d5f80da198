"""Functions under jit, which JAX traces anew for the tools; if these insert nothing, the user's runs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import jax
from amanda import interceptor
from amanda.backend import Patches, State
from jax._src import core, pjit
from jax.extend.core.primitives import jit_p

from ._contexts import ToolStackPrograms, cache_key_of, set_cache_key, with_cache_key, without_tools
from ._primitives import ORIGINALS
from ._requirements import FUNCTIONS_OF_OPS, flatten_arguments, wrap_optional
from ._traces import (
    INSERTION,
    TAP,
    as_part,
    collecting_notes,
    is_differentiated,
    is_on_tangents,
    is_within_jit,
    take_part_originals,
)
from ._twins import is_differentiable, run_twice, wants_backward
from ._variants import ProgramWithInputs, with_read_inputs

AHEAD_OF_TIME = "it was compiled ahead of time, so its ops are in an executable; call the function itself"
PARTITIONED = "JAX keeps it with its partitioning, as a part of one primitive; call the function itself"
VALUES_AND_TANGENTS = (
    "its derivative is taken after it was traced: JAX computes values and tangents in one program there"
)
_NO_PROGRAM = SimpleNamespace(effects=(), consts=())


class _OpByOpFunction(NamedTuple):
    """Stand-in for the program of a function of JAX's, which runs op by op instead.

    infer: returns the program, traced without tools, and its inputs.  arguments: JAX's flat tree of them,
    whose `vals` are its leaves.
    """

    infer: Callable[[], tuple[Any, list[Any]]]
    arguments: Any


class _GuardedProgram(NamedTuple):
    """A program whose guards Python checks before each call.  params: JAX's parameters of the program."""

    params: Any


class _Findings(NamedTuple):
    """Findings of the trace of a program.

    notes: on its contents.  program_with_inputs: None unless values are read at each call.  has_guards: True
    if values are compared at each call.  reports: subject and reason of what tools may not see.
    """

    notes: Mapping[str, None]
    program_with_inputs: ProgramWithInputs | None = None
    has_guards: bool = False
    reports: Sequence[tuple[str, str]] = ()


def instrument_jit(patches: Patches) -> None:
    """Patch JAX to trace functions for the tools, and to report executables compiled ahead of time.

    Also to report functions with a partitioning, and to trace functions that are parts of ops without tools.
    """
    patches.set(pjit, "_infer_params", _trace_for_tools(pjit._infer_params))
    patches.set(pjit, "_run_python_pjit", _run_for_tools(pjit._run_python_pjit))
    wrap_optional(patches, "stages:Compiled.__call__", partial(_report_and_run, AHEAD_OF_TIME))
    wrap_optional(patches, "export._export:Exported.call", partial(_report_and_run, AHEAD_OF_TIME))
    wrap_optional(
        patches, "custom_partitioning:custom_partitioning.__call__", partial(_report_and_run, PARTITIONED)
    )
    # `jit(f).lower` lowers the user's program; the rules for loops and others trace parts of it anew.
    for function in (*FUNCTIONS_OF_OPS, "stages:Traced.lower"):
        wrap_optional(patches, function, without_tools())


def _is_trace_request(frame: FrameType | None) -> bool:
    """Return True if this frame, or one a few above, is that of `jit(f).trace`."""
    # Within jax2tf AutoGraph calls its own copies of JAX's functions, `tf__jit_trace` by way of two others.
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name.endswith("jit_trace"):
            return True
        frame = frame.f_back
    return False


def _trace_for_tools(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `pjit._infer_params`, which traces the program of a call or finds it: for the tools."""

    @wraps(original)
    def _infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        """Return the program for the tools, and its inputs; the user's where the tools insert nothing.

        For a function of JAX, and for a program with guards, a stand-in that `_run_python_pjit` takes.
        """
        activation = interceptor.active()
        if activation is None:
            return original(fun, info, args, kwargs)
        # `jit(f).trace` asks for the user's program, and ops on tangents are not the user's.
        if _is_trace_request(sys._getframe(1)) or is_on_tangents(jax.tree_util.tree_leaves((args, kwargs))):
            with without_tools():
                return original(fun, info, args, kwargs)
        if is_within_jit():
            with collecting_notes() as notes:
                program, inputs = original(as_part(fun, args, kwargs, ORIGINALS.of), info, args, kwargs)
            findings = _Findings(notes)
        elif _is_of_jax(fun, info):
            # Functions of `jax.numpy` are jitted one by one: op by op they have ids at the user's line.
            # `_run_python_pjit` gets the stand-in, without inputs.
            arguments = flatten_arguments(args, kwargs, info.static_argnums, info.static_argnames)
            return _OpByOpFunction(partial(original, fun, info, args, kwargs), arguments), []
        else:
            program, inputs, findings = _trace_outermost(original, activation.state, fun, info, args, kwargs)
        program_with_inputs = findings.program_with_inputs
        if program_with_inputs is not None:
            # JAX passes the constants of a program ahead of its arguments.
            arguments = inputs[len(program.consts) :]
            return _GuardedProgram(program_with_inputs.params), [*program_with_inputs.inputs(), *arguments]
        # Taps alone matter only if a derivative may be taken around this call.
        if INSERTION in findings.notes or (TAP in findings.notes and not core.trace_state_clean()):
            return _GuardedProgram(program) if findings.has_guards else program, inputs
        with without_tools():  # the tools inserted nothing: the user's program runs
            return original(fun, info, args, kwargs)

    return _infer_params


def _trace_outermost(
    original: Callable[..., Any], state: State, fun: Any, info: Any, args: Any, kwargs: Any
) -> tuple[Any, list[Any], _Findings]:
    """Trace a function that no program around calls, or find its program in JAX's caches.

    Returns program, inputs and findings of the trace. Reports what tools may not see in the program, and
    numbers the program's places anew.
    """
    # A program counts its repeats of places from its beginning, so that each trace has the same ids.
    interceptor.reset_root()
    programs = ToolStackPrograms.of(state.stack)
    variants = programs.variants_of(fun)
    with variants.current_variant() as variant:
        # The thread's key, which `set_cache_key` has set, is that of variant 0.
        key = with_cache_key(cache_key_of(state, variant.number)) if variant.number else nullcontext()
        with collecting_notes() as notes, key:
            program, inputs = original(variants.call, info, args, kwargs)
        jaxpr = program.params["jaxpr"]
        if jaxpr not in programs.findings:  # JAX has traced it now: notes and variant are those of the trace
            program_with_inputs = with_read_inputs(program, variant.inputs)
            reports = variant.report_entries()
            has_guards = variant.reads.has_guards or bool(reports)
            programs.findings[jaxpr] = _Findings(notes, program_with_inputs, has_guards, reports)
    findings: _Findings = programs.findings[jaxpr]
    state.report_all(variant, findings.reports)
    if any(map(is_differentiated, inputs)):
        for ops in (note for note in findings.notes if note not in (INSERTION, TAP)):
            state.report(ops, VALUES_AND_TANGENTS)
    return program, inputs, findings


def _is_of_jax(fun: Any, info: Any) -> bool:
    """Return True for a function of JAX that is jitted without shardings."""
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    if any(sharding is not None and sharding is not pjit.UNSPECIFIED for sharding in shardings):
        return False
    return str(getattr(fun, "__module__", "")).partition(".")[0] == "jax"


def _run_for_tools(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `pjit._run_python_pjit`, which runs the program of a call: runs it for the tools."""

    @wraps(original)
    def _run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        """Run a program, or the stand-in for one; return results, their leaves, and data for JAX's fast path.

        That is JAX's native code, which calls a cached executable without Python from the second call on.
        """
        if type(p) is _OpByOpFunction:
            results = _run_op_by_op(p, fun, partial(original, fun=fun, args=args, kwargs=kwargs))
            # Without leaves and executable the fast path caches nothing, and JAX comes here again.
            return results, None, None, None, _NO_PROGRAM, None, None, ()
        # Taken at each run, so that a later part does not find those of this one.
        originals = take_part_originals()
        if type(p) is _GuardedProgram:
            program = p.params
            # The fast path would skip the guards.
            with without_tools():
                leaves = jit_p.bind(*args_flat, **program.params)
            results = jax.tree_util.tree_unflatten(program.out_tree, leaves)
            ORIGINALS.record_all(results, originals)
            return results, leaves, None, None, _NO_PROGRAM, None, None, ()
        if interceptor.active() is None:
            return original(p, args_flat, fun, args, kwargs)
        with without_tools():
            results_and_fast_path = original(p, args_flat, fun, args, kwargs)
        if is_within_jit():
            ORIGINALS.record_all(results_and_fast_path[0], originals)
        elif core.trace_state_clean():
            set_cache_key()  # a tool may have had ops analysed again
        return results_and_fast_path

    return _run_python_pjit


def _run_op_by_op(stand_in: _OpByOpFunction, fun: Callable[..., Any], run_program: Callable[..., Any]) -> Any:
    """Run a function of JAX's op by op for the tools; JAX's program runs too, as `run_twice` has it.

    Returns the results' tree.  run_program: JAX's, of a program and its inputs.
    """
    result_tree: Any = None
    with without_tools():
        arguments = stand_in.arguments.map(_as_array)

    def run_untapped() -> list[Any]:
        """Run JAX's own program of the function, without the tools; return its results."""
        with without_tools():
            program, inputs = stand_in.infer()
            results, *_ = run_program(program, [*inputs[: len(program.consts)], *arguments.vals])
        return list(jax.tree_util.tree_leaves(results))

    def run_ops(values: Sequence[Any]) -> list[Any]:
        """Run the ops of the function one by one, for the tools; return the results."""
        nonlocal result_tree
        args, kwargs = arguments.update(values).unflatten()
        leaves, result_tree = jax.tree_util.tree_flatten(fun(*args, **kwargs))
        with without_tools():
            return list(map(_as_array, leaves))

    # The gradients of JAX's function are wanted to the bit only if a tool looks at backward ops.
    tools_see_backward = wants_backward()
    if tools_see_backward:  # gradients of symbols that the function closes over would be counted twice
        with without_tools():
            program, inputs = stand_in.infer()
        tools_see_backward = not any(map(is_differentiable, inputs[: len(program.consts)]))
    leaves = run_twice(arguments.vals, run_untapped, run_ops, tools_see_backward)
    return jax.tree_util.tree_unflatten(result_tree, leaves)


def _as_array(value: Any) -> Any:
    """Return an argument or a result of a function as the array that JAX makes of it under jit."""
    return value if isinstance(value, (jax.Array, jax.Ref)) else jax.numpy.asarray(value)


def _report_and_run(reason: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of JAX that runs code which cannot be traced for tools: report it, and run it."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Report the object under its function's name if tools are in force; run it without them."""
        activation = interceptor.active()
        if activation is None:
            return original(self, *args, **kwargs)
        function = getattr(self, "fun", None)
        name = getattr(self, "fun_name", None) or getattr(function, "__name__", type(self).__name__)
        kind = "compiled" if reason is AHEAD_OF_TIME else "partitioned"
        activation.state.report(f"inside of the {kind} {name}", reason)
        with without_tools():
            return original(self, *args, **kwargs)

    return call

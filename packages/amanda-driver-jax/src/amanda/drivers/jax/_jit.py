"""Functions under jit: traced anew for the tools; if tools insert nothing, the user's program runs."""

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
    is_tangent,
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

    infer: returns the program.  inputs: its arguments, in the form that JAX passes to the function.
    """

    infer: Callable[[], Any]
    inputs: Any


class _GuardedProgram(NamedTuple):
    """A program whose guards Python checks before each call.  params: JAX's parameters of the program."""

    params: Any


class _Findings(NamedTuple):
    """Findings of the trace of a program: notes on its contents, and the values to be read at each call."""

    notes: Mapping[str, None]
    program: ProgramWithInputs | None = None
    guards: bool = False
    reports: Sequence[tuple[str, str]] = ()


def instrument_jit(patches: Patches) -> None:
    """Patch JAX to trace functions for the tools, and to report executables compiled ahead of time."""
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
    """Return True if `jit(f).trace` calls for the program of `f`, from this frame or a few above."""
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
        """Return the program for the tools, and its inputs; the user's where the tools insert nothing."""
        activation = interceptor.active()
        if activation is None:
            return original(fun, info, args, kwargs)
        # `jit(f).trace` asks for the user's program, and ops on tangents are not the user's.
        if _is_trace_request(sys._getframe(1)) or is_tangent(jax.tree_util.tree_leaves((args, kwargs))):
            with without_tools():
                return original(fun, info, args, kwargs)
        if is_within_jit():
            with collecting_notes() as notes:
                program, flat = original(as_part(fun, args, kwargs, ORIGINALS.of), info, args, kwargs)
            findings = _Findings(notes)
        elif _is_of_jax(fun, info):
            # Functions of `jax.numpy` are jitted one by one: op by op they have ids at the user's line.
            inputs = flatten_arguments(args, kwargs, info.static_argnums, info.static_argnames)
            return _OpByOpFunction(partial(original, fun, info, args, kwargs), inputs), []
        else:
            program, flat, findings = _trace_outermost(original, activation.state, fun, info, args, kwargs)
        if findings.program is not None:
            return _GuardedProgram(findings.program.params), [
                *findings.program.inputs(),
                *flat[len(program.consts) :],
            ]
        # Taps alone matter only if a derivative may be taken around this call.
        if INSERTION in findings.notes or (TAP in findings.notes and not core.trace_state_clean()):
            return _GuardedProgram(program) if findings.guards else program, flat
        with without_tools():  # the tools inserted nothing: the user's program runs
            return original(fun, info, args, kwargs)

    return _infer_params


def _trace_outermost(
    original: Callable[..., Any], state: State, fun: Any, info: Any, args: Any, kwargs: Any
) -> tuple[Any, list[Any], _Findings]:
    """Trace a function that no program around calls, or find its program.

    Returns program, inputs and findings of the trace. Reports what tools may not see in the program.
    """
    # A program counts its repeats of places from its beginning, so that each trace has the same ids.
    interceptor.reset_root()
    programs = ToolStackPrograms.of(state.stack)
    function = programs.variants_of(fun)
    with function.current_variant() as variant:
        key = with_cache_key(cache_key_of(state, variant.number)) if variant.number else nullcontext()
        with collecting_notes() as notes, key:
            program, flat = original(function.call, info, args, kwargs)
        closed = program.params["jaxpr"]
        if closed not in programs.findings:
            program_with_inputs = with_read_inputs(program, variant.inputs)
            reports = variant.report_entries()
            guards = variant.reads.guards or bool(reports)
            programs.findings[closed] = _Findings(notes, program_with_inputs, guards, reports)
    findings: _Findings = programs.findings[closed]
    state.report_all(variant, findings.reports)
    if any(map(is_differentiated, flat)):
        for ops in (note for note in findings.notes if note not in (INSERTION, TAP)):
            state.report(ops, VALUES_AND_TANGENTS)
    return program, flat, findings


def _is_of_jax(fun: Any, info: Any) -> bool:
    """Return True for a function of JAX that is jitted without placements."""
    placed = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    if any(sharding is not None and sharding is not pjit.UNSPECIFIED for sharding in placed):
        return False
    return str(getattr(fun, "__module__", "")).partition(".")[0] == "jax"


def _run_for_tools(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `pjit._run_python_pjit`, which runs the program of a call: runs it for the tools."""

    @wraps(original)
    def _run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is _OpByOpFunction:
            results = _run_op_by_op(p, fun, partial(original, fun=fun, args=args, kwargs=kwargs))
            # Without outputs and executable, JAX's native code caches nothing and comes here again.
            return results, None, None, None, _NO_PROGRAM, None, None, ()
        # Taken at each run, so that a later part does not find those of this one.
        originals = take_part_originals()
        if type(p) is _GuardedProgram:
            p = p.params
            # Not JAX's fast path, which would skip the guards from the second call on.
            with without_tools():
                flat = jit_p.bind(*args_flat, **p.params)
            results = jax.tree_util.tree_unflatten(p.out_tree, flat)
            ORIGINALS.record_all(results, originals)
            return results, flat, None, None, _NO_PROGRAM, None, None, ()
        if interceptor.active() is None:
            return original(p, args_flat, fun, args, kwargs)
        with without_tools():
            results = original(p, args_flat, fun, args, kwargs)
        if is_within_jit():
            ORIGINALS.record_all(results[0], originals)
        elif core.trace_state_clean():
            set_cache_key()  # a tool may have had ops analysed again
        return results

    return _run_python_pjit


def _run_op_by_op(part: _OpByOpFunction, fun: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Run a function of JAX's op by op for the tools.  run: runs a program with inputs."""
    tree: Any = None
    with without_tools():
        inputs = part.inputs.map(_as_array)

    def function() -> list[Any]:
        """Run JAX's own program of the function, without the tools; return its results."""
        with without_tools():
            program, flat = part.infer()
            results, *_ = run(program, [*flat[: len(program.consts)], *inputs.vals])
        return list(jax.tree_util.tree_leaves(results))

    def ops(values: Sequence[Any]) -> list[Any]:
        """Run the ops of the function one by one, for the tools; return the results."""
        nonlocal tree
        args, kwargs = inputs.update(values).unflatten()
        leaves, tree = jax.tree_util.tree_flatten(fun(*args, **kwargs))
        with without_tools():
            return list(map(_as_array, leaves))

    # The gradients of JAX's function are wanted to the bit only if a tool looks at backward ops.
    backward = wants_backward()
    if backward:  # gradients of symbols that the function closes over would be counted twice
        with without_tools():
            program, flat = part.infer()
        backward = not any(map(is_differentiable, flat[: len(program.consts)]))
    results = run_twice(inputs.vals, function, ops, backward)
    return jax.tree_util.tree_unflatten(tree, results)


def _as_array(value: Any) -> Any:
    """Return an argument or a result of a function as the array that JAX makes of it under jit."""
    return value if isinstance(value, (jax.Array, jax.Ref)) else jax.numpy.asarray(value)


def _report_and_run(reason: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that runs code which cannot be traced for tools: report it, then run it as it is."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
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

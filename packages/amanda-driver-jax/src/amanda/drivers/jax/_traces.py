"""The traces in which code runs: JAX nests them, and each wraps values of the trace around it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

import jax
from jax._src import core
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

ARRAYS = (jax.Array, np.ndarray, np.generic)
INSERTION, TAP = "a routine is in the program", "the program shows cotangents"


class _TraceState(threading.local):
    """State of a thread.

    notes: of the program that is traced.  calls: the jitted functions that are traced as parts, each with
    trace, inner and outer arguments.  part_originals: originals of the last part's results, until the
    program around the part has symbols for them.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.calls: list[tuple[Any, list[Any], list[Any]]] = []
        self.part_originals: list[Any] = []


_thread = _TraceState()


def add_note(content: str) -> None:
    """Note a content of the program that is traced: INSERTION, TAP, or ops that tools may not see in it."""
    _thread.notes[content] = None


@contextmanager
def collecting_notes() -> Iterator[dict[str, None]]:
    """Yield the notes that `add_note` writes while a program is traced in this context."""
    before, _thread.notes = _thread.notes, {}
    try:
        yield _thread.notes
    finally:
        before.update(_thread.notes)
        _thread.notes = before


def as_part(
    function: Callable[..., Any], args: Any, kwargs: Any, original: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a function to be traced as a part of the program that calls it with these arguments.

    JAX traces a new function each time, so that each call has ops of its own.
    original: returns the original of a symbol in the outermost function.
    """
    outer = jax.tree_util.tree_leaves((args, kwargs))

    def traced(*args: Any, **kwargs: Any) -> Any:
        inner = jax.tree_util.tree_leaves((args, kwargs))
        _thread.calls.append((core.trace_ctx.trace, inner, outer))
        try:
            results = function(*args, **kwargs)
            leaves = map(original, jax.tree_util.tree_leaves(results))
            _thread.part_originals = [None if _is_of_trace(leaf) else leaf for leaf in leaves]
        finally:
            _thread.calls.pop()
        return results

    # `__wrapped__` would lead JAX to the user's function, of which it may have a program.
    wraps(function)(traced)
    del traced.__wrapped__  # type: ignore[attr-defined]
    return traced


def _is_of_trace(value: Any) -> bool:
    """Return True for a symbol of the traced program, if JAX checks for leaked tracers.

    Without the check symbols are held, for tools that follow a value out of the part.
    """
    is_checked = jax.config.jax_check_tracer_leaks
    return is_checked and isinstance(value, jax.core.Tracer) and value._trace is core.trace_ctx.trace


def take_part_originals() -> list[Any]:
    """Return and forget the originals of the results of the part that was traced last."""
    originals, _thread.part_originals = _thread.part_originals, []
    return originals


def is_tensor(value: Any) -> bool:
    """Return True for an array of JAX or NumPy, or the symbol of an array."""
    return isinstance(value, ARRAYS)


def is_numeric(value: Any) -> bool:
    """Return True for an array of a type that NumPy has: not of random keys, and not of float0."""
    return (
        is_tensor(value)
        and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
        and value.dtype != jax.dtypes.float0
    )


def primal(value: Any) -> Any:
    """Return the value that derivatives are computed at: an array, or a symbol where code is staged."""
    while isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)):
        value = value.primal
    return value


def base_trace() -> Any:
    """Return the trace below the traces of derivatives: evaluation, a program's trace, or a vmap's."""
    trace: Any = core.trace_ctx.trace
    # Batch traces stay: under vmap routines get batched values.
    while isinstance(trace, (ad.LinearizeTrace, ad.JVPTrace, pe.JaxprTrace)):
        trace = trace.parent_trace
    return trace


def is_staged() -> bool:
    """Return True if ops that are bound now become part of a program, or run under vmap, without values."""
    return base_trace() is not core.eval_trace


def is_within_jit() -> bool:
    """Return True where code is traced for jit, scan or the like, in whichever transformation."""
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_tangent(values: Sequence[Any]) -> bool:
    """Return True for an op on tangents, of a rule of a derivative or of the program made of rules."""
    trace: Any = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(trace, "tag"):  # set on such programs alone
        return True
    return any(isinstance(primal(value), pe.JaxprTracer) for value in values)


def needs_gradient(value: Any) -> bool:
    """Return True if a value is differentiated, or is of a program that may be."""
    if isinstance(value, batching.BatchTracer):
        return needs_gradient(value.val)
    if isinstance(value, pe.DynamicJaxprTracer):
        return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))
    return is_differentiated(value)


def is_differentiated(value: Any) -> bool:
    """Return True if the derivative of a value is taken around the program that is called with it."""
    if isinstance(value, batching.BatchTracer):
        return is_differentiated(value.val)
    return isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)) and type(value.tangent) is not ad.Zero


def argument_of(value: Any) -> Any:
    """Return the symbol of the outermost function that was passed as this symbol; else the value itself."""
    value = primal(value)
    if isinstance(value, pe.DynamicJaxprTracer):
        # From the innermost part outwards, as each part's arguments are symbols of the one around it.
        for trace, inner, outer in reversed(_thread.calls):
            if trace is value._trace:
                passed = (
                    outer_value
                    for inner_value, outer_value in zip(inner, outer, strict=False)
                    if inner_value is value
                )
                return next(map(argument_of, passed), value)
    return value


def argument_name(value: Any) -> str | None:
    """Return JAX's name of a symbol that is an argument of a jitted function: "params['w']"; else None."""
    value = argument_of(value)
    if not isinstance(value, pe.DynamicJaxprTracer):
        return None
    frame = value._trace.frame
    names = () if frame.debug_info is None else frame.debug_info.arg_names or ()
    pairs = zip(frame.invars, names, strict=False)
    return next((name for variable, name in pairs if variable is value.val), None)

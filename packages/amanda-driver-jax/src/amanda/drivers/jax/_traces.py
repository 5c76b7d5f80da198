"""JAX's nested traces: which symbols, tangents and arguments values are, and notes on the traced program."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

import jax
from jax._src import core
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

ARRAYS = (jax.Array, np.ndarray, np.generic)
INSERTION, TAP = "a routine is in the program", "the program shows cotangents"


class _TracedPart(NamedTuple):
    """A jitted function that is traced within another: its trace, its symbols, and what the caller passed."""

    trace: Any
    symbols: list[Any]
    passed_values: list[Any]


class _TraceState(threading.local):
    """State of a thread.

    notes: of the program that is traced, as an ordered set.  parts: the jitted functions under way within
    that program, innermost last.  part_originals: for each result of the last part its original in the
    outermost function, None for a symbol that would leak, until the program around has symbols for them.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.parts: list[_TracedPart] = []
        self.part_originals: list[Any] = []


_thread = _TraceState()


def add_note(content: str) -> None:
    """Note a content of the program that is traced: INSERTION, TAP, or ops that tools may not see in it."""
    _thread.notes[content] = None


@contextmanager
def collecting_notes() -> Iterator[dict[str, None]]:
    """Yield the notes of the program that is traced in this context; at the end the one around gets them."""
    outer_notes, _thread.notes = _thread.notes, {}
    try:
        yield _thread.notes
    finally:
        outer_notes.update(_thread.notes)
        _thread.notes = outer_notes


def as_part(
    function: Callable[..., Any], args: Any, kwargs: Any, original_of: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Wrap a jitted function that JAX traces as a part of the program that calls it with these arguments.

    JAX traces a new wrapper each time, so that each call has ops of its own. The trace leaves the originals
    of the results for `take_part_originals`.
    original_of: returns the original of a symbol in the outermost function.
    """
    passed_values = jax.tree_util.tree_leaves((args, kwargs))

    def trace_part(*args: Any, **kwargs: Any) -> Any:
        """Call the function as the innermost part; leave the originals of its results."""
        symbols = jax.tree_util.tree_leaves((args, kwargs))
        _thread.parts.append(_TracedPart(core.trace_ctx.trace, symbols, passed_values))
        try:
            results = function(*args, **kwargs)
            originals = map(original_of, jax.tree_util.tree_leaves(results))
            _thread.part_originals = [None if _would_leak(item) else item for item in originals]
        finally:
            _thread.parts.pop()
        return results

    # `__wrapped__` would lead JAX to the user's function, of which it may have a program.
    wraps(function)(trace_part)
    del trace_part.__wrapped__  # type: ignore[attr-defined]
    return trace_part


def _would_leak(value: Any) -> bool:
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
    """Return the trace around which derivatives are taken: evaluation, a program's trace, or a vmap's."""
    trace: Any = core.trace_ctx.trace
    # The loop stops at a batch trace, since under vmap routines get batched values.
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


def is_on_tangents(inputs: Sequence[Any]) -> bool:
    """Return True for an op on tangents: an op of a derivative rule, or of a linear program made of rules."""
    return _is_linear(core.trace_ctx.trace) or any(map(_is_tangent, inputs))


def _is_linear(trace: Any) -> bool:
    """Return True for the trace of a linear program: JAX sets `tag` on these alone."""
    return isinstance(trace, pe.DynamicJaxprTrace) and hasattr(trace, "tag")


def _is_tangent(value: Any) -> bool:
    """Return True for a symbol of a linear program, also for one that a rule under vmap maps."""
    value = primal(value)
    while isinstance(value, batching.BatchTracer):
        value = primal(value.val)
    is_symbol = isinstance(value, pe.DynamicJaxprTracer)
    return isinstance(value, pe.JaxprTracer) or (is_symbol and _is_linear(value._trace))


def needs_gradient(value: Any) -> bool:
    """Return True if a derivative of a value is taken, or may be: later, of the program that is traced."""
    if isinstance(value, batching.BatchTracer):
        return needs_gradient(value.val)
    if isinstance(value, pe.DynamicJaxprTracer):  # a symbol of a program
        return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))
    return is_differentiated(value)


def is_differentiated(value: Any) -> bool:
    """Return True if the derivative of a value is taken around the program that is called with it."""
    if isinstance(value, batching.BatchTracer):
        return is_differentiated(value.val)
    return isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)) and type(value.tangent) is not ad.Zero


def outermost_value(value: Any) -> Any:
    """Return what the outermost traced function passed as this argument of a part; else the primal value."""
    value = primal(value)
    if not isinstance(value, pe.DynamicJaxprTracer):
        return value
    part = next((part for part in reversed(_thread.parts) if part.trace is value._trace), None)
    if part is not None:
        for symbol, passed_value in zip(part.symbols, part.passed_values, strict=False):
            if symbol is value:
                # The caller may be a part, too, and have got the value as an argument.
                return outermost_value(passed_value)
    return value


def argument_name(value: Any) -> str | None:
    """Return JAX's name of a symbol that is an argument of a jitted function: "params['w']"; else None."""
    symbol = outermost_value(value)
    if not isinstance(symbol, pe.DynamicJaxprTracer):
        return None
    frame = symbol._trace.frame
    names = () if frame.debug_info is None else frame.debug_info.arg_names or ()
    arguments = zip(frame.invars, names, strict=False)
    return next((name for variable, name in arguments if variable is symbol.val), None)

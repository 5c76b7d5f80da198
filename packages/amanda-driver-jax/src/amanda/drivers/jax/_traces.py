"""The traces that a value is of: JAX nests them, and each has a value of the one around it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import jax
from jax._src import core
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

from ._programs import passed

ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_tensor(value: Any) -> bool:
    """Return True for an array, a symbol of one, or an array of NumPy, which JAX takes as its own."""
    return isinstance(value, ARRAYS)


def primal(value: Any) -> Any:
    """Return the value that derivatives are computed at: an array, or a symbol where code is staged."""
    while isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)):
        value = value.primal
    return value


def base() -> Any:
    """Return the trace below those of derivatives: JAX's evaluation, or one that makes a program or maps."""
    trace: Any = core.trace_ctx.trace
    while isinstance(trace, (ad.LinearizeTrace, ad.JVPTrace, pe.JaxprTrace)):
        trace = trace.parent_trace
    return trace


def is_staged() -> bool:
    """Return True where what is bound now becomes part of a program, or is mapped over, and has no values."""
    return base() is not core.eval_trace


def is_within_jit() -> bool:
    """Return True where code is traced for jit, scan or the like, in whichever transformation."""
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_tangent(values: Sequence[Any]) -> bool:
    """Return True for an op on tangents, of a rule of a derivative or of the program made of rules."""
    trace: Any = core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and hasattr(
        trace, "tag"
    ):  # JAX sets it on such programs alone
        return True
    return any(isinstance(primal(value), pe.JaxprTracer) for value in values)


def needs_gradient(value: Any) -> bool:
    """Return True if a value is differentiated, or is of a program that may be."""
    if is_differentiated(value):
        return True
    if isinstance(value, batching.BatchTracer):
        return needs_gradient(value.val)
    return isinstance(value, pe.DynamicJaxprTracer) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def is_differentiated(value: Any) -> bool:
    """Return True if the derivative of a value is taken around the program that is called with it."""
    if isinstance(value, batching.BatchTracer):
        return is_differentiated(value.val)
    return isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)) and type(value.tangent) is not ad.Zero


def argument_of(value: Any) -> Any:
    """Return the symbol in the outermost function that a symbol was passed from; itself where it was not."""
    value = primal(value)
    outer = passed(value) if isinstance(value, pe.DynamicJaxprTracer) else None
    return value if outer is None else argument_of(outer)


def argument_name(value: Any) -> str | None:
    """Return JAX's name for the argument of a jitted function that a symbol is: "params['w']"."""
    value = primal(value)
    if not isinstance(value, pe.DynamicJaxprTracer):
        return None
    frame = value._trace.frame
    outer = passed(value)
    if outer is not None:
        return argument_name(outer)
    names = frame.debug_info.arg_names if frame.debug_info is not None else None
    index = next((i for i, one in enumerate(frame.invars) if one is value.val), None)
    return names[index] if names is not None and index is not None and index < len(names) else None

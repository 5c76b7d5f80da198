"""Gradients of a parameter where no tape leads to it: programs add them to a sum as they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any, Protocol, cast

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.search._candidates import SearchError


class Gradients(Protocol):
    """Sum of the gradients of a parameter since the last `take`."""

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""


class GradientSum:
    """Sum to which Python adds; it has a lock, since programs call it from any thread."""

    def __init__(self) -> None:
        self._sum: Any = None
        self._lock = Lock()

    def add(self, gradient: Any) -> None:
        """Add the gradient of one execution."""
        with self._lock:
            self._sum = gradient if self._sum is None else self._sum + gradient

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock:
            total, self._sum = self._sum, None
        return total


class JaxGradientSum:
    """Sum of the gradients of a parameter, and their number, in references of JAX.

    op: name of the parameter's op, for errors.
    """

    def __init__(self, parameter: Any, op: str) -> None:
        self._lock, self._op = Lock(), op
        reference = tensors_of(parameter).reference
        self._total = reference(np.zeros(parameter.shape, parameter.dtype))
        self._count = reference(np.int32(0))

    def collect(self, value: Any, like: Any) -> Any:
        """Return the parameter's value, whose gradient is added to the sum where `like` is differentiated.

        JAX differentiates by values that the program passes to `grad`, and the parameter is none of them.
        """
        return _collecting_function()(value, like, self._total, self._count, self._op)

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock, amanda.disabled():
            if not int(self._count[...]):
                return None
            total = self._total[...]
            self._total[...] = np.zeros(self._total.shape, self._total.dtype)
            self._count[...] = np.int32(0)
        return total


@cache
def _collecting_function() -> Callable[..., Any]:
    """Return a function that returns a value, and whose backward pass adds gradients to two references."""
    import jax

    @partial(jax.custom_vjp, nondiff_argnums=(4,))
    def collect(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        return value

    def forward(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        _refuse_differentiated_branches(op)
        return value, (total, count)

    def backward(op: str, references: tuple[Any, Any], gradient: Any) -> Any:
        _add_to_references(*references, gradient)
        return gradient, None, None, None

    collect.defvjp(forward, backward)
    return cast("Callable[..., Any]", collect)


def _refuse_differentiated_branches(op: str) -> None:
    """Raise SearchError while a branch of `cond` or `switch` is differentiated.

    JAX gives no hint of it, so its functions are looked for among the callers.
    """
    from jax._src.lax.control_flow.conditionals import _cond_jvp, _cond_linearize

    # JAX lets no write to a reference out of a branch, so the gradients would be lost.
    codes, frame = (_cond_jvp.__code__, _cond_linearize.__code__), sys._getframe()
    while frame.f_back is not None and frame.f_code not in codes:
        frame = frame.f_back
    if frame.f_back is not None:
        raise SearchError(
            f"SearchTool: {op} is in a branch of jax.lax.cond or switch that is differentiated, and its "
            "candidates have parameters, whose gradients JAX lets out of no branch; compute all branches and "
            "select by jax.numpy.where, or give the op candidates without parameters and mixture=False"
        )


def _add_to_references(total: Any, count: Any, gradient: Any) -> None:
    """Add a gradient to a sum, under `vmap` the gradient's sum over the rows.

    A batched trace cannot write to a reference of an outer trace, so the write is made in the outer trace.
    """
    from jax._src import core
    from jax._src.interpreters import batching

    gradient = _row_sum_function()(gradient)
    trace: Any = core.trace_ctx.trace
    while isinstance(trace, batching.BatchTrace):
        trace = trace.parent_trace
    with core.set_current_trace(trace):
        total[...] += gradient
        count[...] += 1


@cache
def _row_sum_function() -> Callable[..., Any]:
    """Return a function that returns its argument, under `vmap` the sum over the rows."""
    from jax.custom_batching import custom_vmap

    @custom_vmap  # type: ignore[untyped-decorator]
    def summed(gradient: Any) -> Any:
        return gradient

    @summed.def_vmap  # type: ignore[untyped-decorator]
    def _(axis_size: int, in_batched: Any, gradient: Any) -> Any:
        return summed(gradient.sum(0)), False

    return cast("Callable[..., Any]", summed)

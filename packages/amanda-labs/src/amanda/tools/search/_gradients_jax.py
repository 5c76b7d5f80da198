"""Gradients in JAX: programs add them to an array in a reference, and call no Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any, cast

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.search._errors import SearchError


class JaxGradientSum:
    """Sum of the gradients of one parameter, and their number, in references of JAX.

    op: name of the op that the parameter is of.
    """

    def __init__(self, parameter: Any, op: str) -> None:
        self._lock, self._op = Lock(), op
        reference = tensors_of(parameter).reference
        self._total = reference(np.zeros(parameter.shape, parameter.dtype))
        self._count = reference(np.int32(0))

    def followed(self, value: Any, like: Any) -> Any:
        """Return the parameter's value, whose gradient is added where `like` is differentiated.

        The program knows of no parameter here, and JAX takes derivatives by what the program names.
        """
        return _follows()(value, like, self._total, self._count, self._op)

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock, amanda.disabled():
            if not int(self._count[...]):
                return None
            found = self._total[...]
            self._total[...] = np.zeros(self._total.shape, self._total.dtype)
            self._count[...] = np.int32(0)
        return found


@cache
def _follows() -> Callable[..., Any]:
    """Return a function that gives a value, and adds the value's gradients to two references."""
    import jax

    @partial(jax.custom_vjp, nondiff_argnums=(4,))
    def followed(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        return value

    def forward(value: Any, like: Any, total: Any, count: Any, op: str) -> Any:
        _refuse_branches(op)
        return value, (total, count)

    def backward(op: str, references: tuple[Any, Any], gradient: Any) -> Any:
        _add(*references, gradient)
        return gradient, None, None, None

    followed.defvjp(forward, backward)
    return cast("Callable[..., Any]", followed)


def _refuse_branches(op: str) -> None:
    """Raise SearchError while a branch of `cond` or `switch` is differentiated."""
    from jax._src.lax.control_flow.conditionals import _cond_jvp, _cond_linearize

    codes, frame = (_cond_jvp.__code__, _cond_linearize.__code__), sys._getframe()
    while frame.f_back is not None and frame.f_code not in codes:
        frame = frame.f_back
    if frame.f_back is not None:
        raise SearchError(
            f"SearchTool: {op} is in a branch of jax.lax.cond or switch that is differentiated, and its "
            "candidates have parameters, whose gradients JAX lets out of no branch; compute all branches and "
            "select by jax.numpy.where, or give the op candidates without parameters and mixture=False"
        )


def _add(total: Any, count: Any, gradient: Any) -> None:
    """Add a gradient; under `vmap`, which writes into no reference from within, the sum over the rows."""
    from jax._src import core
    from jax._src.interpreters import batching

    gradient = _sums()(gradient)
    trace: Any = core.trace_ctx.trace
    while isinstance(trace, batching.BatchTrace):
        trace = trace.parent_trace
    with core.set_current_trace(trace):
        total[...] += gradient
        count[...] += 1


@cache
def _sums() -> Callable[..., Any]:
    """Return a function that gives its argument, and under `vmap` the sum over the rows."""
    from jax.custom_batching import custom_vmap

    @custom_vmap  # type: ignore[untyped-decorator]
    def summed(gradient: Any) -> Any:
        return gradient

    @summed.def_vmap  # type: ignore[untyped-decorator]
    def _(axis_size: int, in_batched: Any, gradient: Any) -> Any:
        return summed(gradient.sum(0)), False

    return cast("Callable[..., Any]", summed)

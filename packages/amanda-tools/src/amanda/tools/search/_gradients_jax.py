"""Gradients in JAX: programs add them to an array in a reference, and call no Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, cast

import amanda
from amanda.tools._libraries import numpy as np
from amanda.tools.kit._tensors_jax import new_reference


class JaxGradientSum:
    """Sum of the gradients of one parameter, and their number, in references of JAX."""

    def __init__(self, parameter: Any) -> None:
        self._lock = Lock()
        self._total = new_reference(np.zeros(parameter.shape, parameter.dtype))
        self._count = new_reference(np.int32(0))

    def followed(self, value: Any, like: Any) -> Any:
        """Return the parameter's value, whose gradient is added where `like` is differentiated.

        The program knows of no parameter here, and JAX takes derivatives by what the program names.
        """
        return _follows()(value, like, self._total, self._count)

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

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def followed(value: Any, like: Any, total: Any, count: Any) -> Any:
        return value

    def forward(value: Any, like: Any, total: Any, count: Any) -> Any:
        return value, (total, count)

    def backward(references: tuple[Any, Any], gradient: Any) -> Any:
        _add(*references, gradient)
        return gradient, None, None, None

    followed.defvjp(forward, backward)
    return cast("Callable[..., Any]", followed)


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

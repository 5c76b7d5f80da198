"""Primitives of JAX's arrays, and of the symbols that stand for arrays while code is traced."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

import jax
from amanda.backend import UnwrittenTensors
from amanda.errors import RoutineError
from jax._src import core

from ._primitives import ORIGINALS, straight
from ._traces import base, is_staged, is_tensor, needs_gradient, primal


class Arrays(UnwrittenTensors):
    """JAX's arrays."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is an array or stands for one."""
        return is_tensor(value)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each array, and whether it has a value."""
        return tuple(_each(value, lambda one: (one.dtype, one.ndim, _form(one))) for value in inputs)

    def device_of(self, value: Any) -> str:
        """Name of the device of an array; "" for a symbol."""
        value = primal(value)
        if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
            return ""
        return str(getattr(value, "device", ""))

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each array."""
        return tuple(_each(value, lambda one: tuple(one.shape)) for value in inputs)

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine on the values themselves, without what derivatives are computed by.

        A result of a function that ran twice is, to tools, what its ops gave.
        """
        given = [_given_by_ops(without_derivative(value)) for value in values]
        with core.set_current_trace(base()):
            result = func(*given, **kwargs)
        own = {id(lent): value for lent, value in zip(given, values, strict=True) if is_tensor(value)}
        if isinstance(result, (list, tuple)):
            return [own.get(id(one), one) for one in result]
        return own.get(id(result), result)

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value`, with the tangent of `original` as its own."""
        return straight(original, fitting(original, value))

    def kept(self, value: Any) -> Any:
        """The value itself; of a symbol, whose trace ends, shape and dtype."""
        value = primal(value)
        if isinstance(value, jax.core.Tracer):
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return [self.kept(one) for one in value] if isinstance(value, (list, tuple)) else value

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which inputs are differentiated; None where none is."""
        needs = tuple(_each(value, needs_gradient) for value in inputs)
        return needs if "True" in str(needs) else None


def _given_by_ops(value: Any) -> Any:
    original = ORIGINALS.of(value) if isinstance(value, jax.Array) else value
    return value if isinstance(original, core.Tracer) else original


def without_derivative(value: Any) -> Any:
    """Return a value, of a list each, through which no derivative goes."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_derivative, value))
    value = primal(value)
    if not isinstance(value, jax.core.Tracer) or not is_staged():
        return value
    with core.set_current_trace(base()):
        return jax.lax.stop_gradient(value)


def fitting(original: Any, value: Any) -> Any:
    """Return a routine's value in the type of the original.

    Raises RoutineError for another shape, and for a complex value in the place of a real one or the reverse.
    """
    if tuple(value.shape) != tuple(original.shape):
        raise RoutineError(
            f"a routine returned shape {tuple(value.shape)} where shape {tuple(original.shape)} was given; "
            "mark it @amanda.differentiable if it is meant to change shapes"
        )
    if value.dtype == original.dtype:
        return value
    if np.issubdtype(value.dtype, np.complexfloating) != np.issubdtype(original.dtype, np.complexfloating):
        raise RoutineError(f"a routine returned {value.dtype} where {original.dtype} was given")
    return value.astype(original.dtype)


def _form(value: Any) -> Hashable:
    value = primal(value)
    return type(value).__name__ if isinstance(value, jax.core.Tracer) else None


def _each(value: Any, read: Callable[[Any], Any]) -> Any:
    if is_tensor(value):
        return read(value)
    if isinstance(value, (list, tuple)):
        return tuple(read(one) for one in value if is_tensor(one)) or None
    return None

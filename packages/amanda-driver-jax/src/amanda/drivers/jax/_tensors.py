"""Operations for the core on JAX's arrays, and on the symbols of arrays in traced code."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

import jax
from amanda.backend import ImmutableTensorOps, complex_error, shape_error
from jax.extend.core import set_current_trace

from ._primitives import ORIGINALS, straight_through
from ._traces import base_trace, is_staged, is_tensor, needs_gradient, primal


class Arrays(ImmutableTensorOps):
    """JAX's arrays."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is an array or stands for one."""
        return is_tensor(value)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each array, and the type of a symbol."""
        return tuple(
            _map_tensors(value, lambda array: (array.dtype, array.ndim, _symbol_type(array)))
            for value in inputs
        )

    def device_of(self, value: Any) -> str:
        """Return the name of an array's device; "" for a symbol."""
        value = primal(value)
        if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
            return ""
        return str(getattr(value, "device", ""))

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of each array."""
        return tuple(_map_tensors(value, lambda array: tuple(array.shape)) for value in inputs)

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine on the values without the tracers of derivatives.

        For the result of a function that ran twice, the routine gets the result of its ops.
        """
        lent_values = [_value_by_ops(without_derivative(value)) for value in values]
        with set_current_trace(base_trace()):
            result = func(*lent_values, **kwargs)
        # A routine that returns a value unchanged must give back the tracer with its derivative.
        value_of_lent = {
            id(lent): value for lent, value in zip(lent_values, values, strict=True) if is_tensor(value)
        }
        if isinstance(result, (list, tuple)):
            return [value_of_lent.get(id(item), item) for item in result]
        return value_of_lent.get(id(result), result)

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` with the tangent of `original`."""
        return straight_through(original, cast_to_fit(original, value))

    def detach_value(self, value: Any) -> Any:
        """Return the value itself; for a symbol, whose trace ends, its shape and dtype."""
        value = primal(value)
        if isinstance(value, jax.core.Tracer):
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return [self.detach_value(item) for item in value] if isinstance(value, (list, tuple)) else value

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which inputs are differentiated; None where none is."""
        needs = tuple(_map_tensors(value, needs_gradient) for value in inputs)
        # The flags nest as lists of inputs do; their text shows if any of them is set.
        return needs if "True" in str(needs) else None


def _value_by_ops(value: Any) -> Any:
    original = ORIGINALS.of(value) if isinstance(value, jax.Array) else value
    return value if isinstance(original, jax.core.Tracer) else original


def without_derivative(value: Any) -> Any:
    """Return a value, or each of a list, through which no derivative goes."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_derivative, value))
    value = primal(value)
    # The primal of a staged program still depends on its arguments, whose derivative is taken later.
    if not isinstance(value, jax.core.Tracer) or not is_staged():
        return value
    with set_current_trace(base_trace()):
        return jax.lax.stop_gradient(value)


def cast_to_fit(original: Any, value: Any) -> Any:
    """Return a routine's value in the type of the original.

    Raises RoutineError for another shape, and for a complex value in the place of a real one or the reverse.
    """
    if tuple(value.shape) != tuple(original.shape):
        raise shape_error(tuple(value.shape), tuple(original.shape))
    if value.dtype == original.dtype:
        return value
    if np.issubdtype(value.dtype, np.complexfloating) != np.issubdtype(original.dtype, np.complexfloating):
        raise complex_error(value.dtype, original.dtype)
    return value.astype(original.dtype)


def _symbol_type(value: Any) -> Hashable:
    value = primal(value)
    return type(value).__name__ if isinstance(value, jax.core.Tracer) else None


def _map_tensors(value: Any, read: Callable[[Any], Any]) -> Any:
    """Read a tensor, or each tensor of a list; return None for anything else."""
    if is_tensor(value):
        return read(value)
    if isinstance(value, (list, tuple)):
        return tuple(read(item) for item in value if is_tensor(item)) or None
    return None

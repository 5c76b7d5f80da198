"""Operations of the core on JAX's arrays, and on symbols (tracers), which stand for arrays in traced code."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import jax
from amanda.backend import BoxedTensors, ImmutableTensorOps, complex_error, shape_error
from jax.extend.core import set_current_trace

from ._primitives import ORIGINALS, straight_through
from ._traces import base_trace, is_staged, is_tensor, needs_gradient, primal


class Arrays(BoxedTensors, ImmutableTensorOps):
    """Tensor operations of JAX for the core; a value may be boxed in tracers of derivatives."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is an array or stands for one."""
        return is_tensor(value)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each array or symbol, and the type of a symbol; None for other inputs."""
        return tuple(
            self.read_each(value, lambda array: (array.dtype, array.ndim, _symbol_type(array)))
            for value in inputs
        )

    def device_of(self, value: Any) -> str:
        """Return the name of an array's device; "" for a symbol, and for an array of NumPy."""
        value = primal(value)
        if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
            return ""
        return str(getattr(value, "device", ""))

    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Return a context below the traces of derivatives."""
        context: AbstractContextManager[Any] = set_current_trace(base_trace())
        return context

    def unboxed(self, value: Any) -> Any:
        """Return a value, or each of a list, without the tracers of derivatives.

        For an array with an original the original, unless that is a symbol: so for the result of a function
        that ran twice, the result of its ops.
        """
        value = without_derivative(value)
        original = ORIGINALS.of(value) if isinstance(value, jax.Array) else value
        return value if isinstance(original, jax.core.Tracer) else original

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` with the tangent of `original`."""
        return straight_through(original, cast_to_fit(original, value))

    def detach_value(self, value: Any) -> Any:
        """Return an array without derivatives; for a symbol, whose trace ends, its shape and dtype.

        In a list, each item's; any other value as it is.
        """
        value = primal(value)
        if isinstance(value, jax.core.Tracer):
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        return [self.detach_value(item) for item in value] if isinstance(value, (list, tuple)) else value

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which inputs are differentiated; None where none is."""
        needs = tuple(self.read_each(value, needs_gradient) for value in inputs)
        # The flags nest as lists of inputs do; their text shows if any of them is set.
        return needs if "True" in str(needs) else None


def without_derivative(value: Any) -> Any:
    """Return a value, or a list of values, such that no derivative is taken through it.

    Where code is staged, this adds a `stop_gradient` to the program.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_derivative, value))
    value = primal(value)
    # The primal of a staged program still depends on its arguments, whose derivative is taken later.
    if not isinstance(value, jax.core.Tracer) or not is_staged():
        return value
    with set_current_trace(base_trace()):
        return jax.lax.stop_gradient(value)


def cast_to_fit(original: Any, value: Any) -> Any:
    """Return a routine's value in the element type of the original.

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

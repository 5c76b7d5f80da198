"""Elements of TensorFlow's tensors, and which inputs were read of variables."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

import amanda
from amanda.tools.inject._elements import Bytes, Positions
from amanda.tools.inject._numpy import ArrayElements
from amanda.tools.mapping._tensorflow import is_parameter


class TensorFlowElements(ArrayElements):
    """Eager tensors, which is what routines are given in every mode."""

    def extents(self, value: Any) -> tuple[int, ...] | None:
        """Shape of an eager tensor of numbers."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or not hasattr(value, "numpy") or getattr(value, "shape", None) is None:
            return None
        is_numeric = dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool
        return tuple(value.shape) if is_numeric and not dtype.is_quantized else None

    def read(self, value: Any, positions: Positions) -> Bytes:
        """Bytes of the elements at positions in the flattened tensor."""
        return super().read(value.numpy(), positions)

    def replaced(self, value: Any, positions: Positions, raw: Bytes) -> Any:
        """A tensor on the same device, with these bytes at these positions."""
        import tensorflow as tf

        array = super().replaced(value.numpy(), positions, raw)
        with tf.device(value.device):
            return tf.constant(array, value.dtype)

    def as_array(self, value: Any) -> NDArray[Any]:
        """The tensor as an array of its own memory."""
        return super().as_array(value.numpy())


def describe(context: amanda.OpContext) -> None:
    """Write `elements`, and `parameters_read`: positions of the inputs that were read of variables."""
    if "elements" in context:
        return
    context["elements"] = TensorFlowElements()
    inputs = context.get_inputs()
    context["parameters_read"] = tuple(i for i in range(len(inputs)) if is_parameter(context, inputs, i))

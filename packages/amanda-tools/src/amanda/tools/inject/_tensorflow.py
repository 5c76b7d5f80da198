"""Elements of TensorFlow's tensors, and which inputs were read of variables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.inject._elements import Bytes, Elements, Positions
from amanda.tools.mapping._tensorflow import is_parameter


class TensorFlowElements(Elements):
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
        return _bytes(value.numpy())[positions]

    def replaced(self, value: Any, positions: Positions, raw: Bytes) -> Any:
        """A tensor on the same device, with these bytes at these positions."""
        import tensorflow as tf

        array = np.array(value.numpy(), order="C")
        _bytes(array)[positions] = raw
        with tf.device(value.device):
            return tf.constant(array, value.dtype)

    def as_array(self, value: Any) -> NDArray[Any]:
        """The tensor as an array of its own memory."""
        array = np.array(value.numpy())
        return array if array.dtype.kind in "biufcSUO" else array.astype(np.float64)

    def from_double(self, numbers: NDArray[np.float64], dtype: str) -> Bytes:
        """Bytes of numbers, as TensorFlow's types round them."""
        import tensorflow as tf

        return _bytes(np.asarray(numbers).astype(tf.as_dtype(dtype).as_numpy_dtype))

    def to_double(self, raw: Bytes, dtype: str) -> NDArray[np.float64]:
        """The numbers that bytes stand for."""
        import tensorflow as tf

        return np.asarray(raw.view(tf.as_dtype(dtype).as_numpy_dtype)[:, 0], np.float64)


def _bytes(array: Any) -> Bytes:
    """The elements as rows of bytes: of the array's own memory if it is contiguous."""
    flat = np.asarray(array).reshape(-1, 1)
    return np.ascontiguousarray(flat).view(np.uint8)


def describe(context: amanda.OpContext) -> None:
    """Write `elements`, and `parameters_read`: positions of the inputs that were read of variables."""
    if "elements" in context:
        return
    context["elements"] = TensorFlowElements()
    inputs = context.get_inputs()
    context["parameters_read"] = tuple(i for i in range(len(inputs)) if is_parameter(context, inputs, i))

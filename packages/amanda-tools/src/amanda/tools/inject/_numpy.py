"""Elements of NumPy's arrays, which routines are given in ONNX Runtime, and which inputs are initializers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.inject._elements import Bytes, Elements, Positions


class ArrayElements(Elements):
    """Arrays of numbers, also of the types of ml_dtypes."""

    def extents(self, value: Any) -> tuple[int, ...] | None:
        """Shape of an array of numbers."""
        is_numeric = isinstance(value, np.ndarray) and value.dtype.kind not in "OSUMm"
        return value.shape if is_numeric else None

    def read(self, value: Any, positions: Positions) -> Bytes:
        """Bytes of the elements at positions in the flattened array."""
        return _bytes(value)[positions]

    def replaced(self, value: Any, positions: Positions, raw: Bytes) -> Any:
        """A copy with these bytes at these positions."""
        array = np.array(value, order="C")
        _bytes(array)[positions] = raw
        return array

    def as_array(self, value: Any) -> NDArray[Any]:
        """The array with memory of its own."""
        array = np.array(value)
        return array if array.dtype.kind in "biufcSUO" else array.astype(np.float64)

    def from_double(self, numbers: NDArray[np.float64], dtype: str) -> Bytes:
        """Bytes of numbers, as ml_dtypes rounds them."""
        return _bytes(np.asarray(numbers).astype(_type(dtype)))

    def to_double(self, raw: Bytes, dtype: str) -> NDArray[np.float64]:
        """The numbers that bytes stand for."""
        return np.asarray(raw.view(_type(dtype))[:, 0], np.float64)


def _type(name: str) -> Any:
    """A type that NumPy lacks: the frameworks that have it bring ml_dtypes."""
    import ml_dtypes

    return getattr(ml_dtypes, name)


def _bytes(array: Any) -> Bytes:
    """The elements as rows of bytes: of the array's own memory if it is contiguous."""
    flat = np.asarray(array).reshape(-1, 1)
    return np.ascontiguousarray(flat).view(np.uint8)


def describe(context: amanda.OpContext) -> None:
    """Write `elements`, and `parameters_read`: positions of the inputs that initializers hold."""
    if "elements" in context:
        return
    context["elements"] = ArrayElements()
    positions = range(len(context.get_inputs()))
    context["parameters_read"] = tuple(i for i in positions if context.get_variable(i) is not None)

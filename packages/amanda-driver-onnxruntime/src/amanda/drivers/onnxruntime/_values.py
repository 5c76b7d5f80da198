"""Values between sessions: arrays, also of the types of ml_dtypes, and lists and dicts of them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx

from onnxruntime import OrtValue


def as_array(value: Any) -> Any:
    """Return a tensor as an array; other values, and elements smaller than a byte, unchanged."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    if not isinstance(value, OrtValue) or not value.is_tensor():
        return value
    try:
        return value.numpy()
    except RuntimeError:
        return _array_of_memory(value)


def _array_of_memory(value: Any) -> Any:
    """Copy the memory of an OrtValue whose dtype `OrtValue.numpy` does not support."""
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type()))
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # Elements smaller than a byte are packed, and memory of other devices cannot be read.
    if value.device_name() != "cpu" or value.tensor_size_in_bytes() != size:
        return value
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)


def as_ort_value(value: Any) -> Any:
    """Return a value in the form that `run_with_ort_values` returns."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.type.__module__ == "numpy":
        return OrtValue.ortvalue_from_numpy(value)
    element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    # NumPy has no name for the dtype, so the bits are passed as unsigned integers.
    bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, element)

"""The arithmetic of quantisation on numpy's arrays; `_pytorch` and `_tensorflow` have the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

rint, floor, where, absolute = np.rint, np.floor, np.where, np.abs
minimum, maximum, reshape = np.minimum, np.maximum, np.reshape


def within(value: Any, x: Any, low: float, high: float) -> Any:
    """`value`, and 0 where `x` is not between two bounds."""
    return np.where((x <= low) | (x >= high), value * 0, value)


def total(x: Any, axes: Sequence[int]) -> Any:
    """The sum over axes."""
    return np.sum(x, axis=tuple(axes))


def extent(x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """The least and the largest elements over axes."""
    return np.min(x, axis=tuple(axes)), np.max(x, axis=tuple(axes))


def like(x: Any, value: Any) -> Any:
    """A number, an array or another tensor in the element type of `x`, where `x` is."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return value.astype(dtype) if hasattr(value, "astype") else np.asarray(value, dtype)


def wide(x: Any) -> Any:
    """In float32, or wider as it is."""
    array = x if hasattr(x, "astype") else np.asarray(x)  # or one that records what is computed of it
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def as_array(x: Any) -> NDArray[Any]:
    """Elements as an array of float32 or wider."""
    return np.asarray(wide(x))


def constant(x: Any) -> Any:
    """The array."""
    return x


def has_kernel(x: Any, axes: Sequence[int]) -> bool:
    """Whether `kernel` takes such an array: there is none."""
    return False

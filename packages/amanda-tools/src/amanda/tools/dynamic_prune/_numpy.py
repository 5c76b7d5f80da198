"""What autoray has no word for, in NumPy, whose arrays routines are given in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]


def parameter(value: Any, like: Any) -> Array:
    """An array, which is not trained: there is no backward pass."""
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    return np.array(array, np.float64 if like.dtype == np.float64 else np.float32)


def renewed(former: Array, value: Array) -> Array:
    """An array with other values."""
    former[...] = value
    return former


def sigmoid(value: Array) -> Array:
    """The logistic function."""
    made: Array = np.exp(-np.logaddexp(0, -value))
    return made


def winners(values: Array, count: int) -> Array:
    """0/1 mask of the largest along the last axis; of equal ones the first."""
    order = np.argsort(-values, axis=-1, kind="stable")
    mask = np.zeros_like(values)
    np.put_along_axis(mask, order[..., :count], 1, axis=-1)
    return mask


def local(x: Array, kernel: Array, stride: tuple[int, int], layout: str) -> Array:
    """A convolution of 3x3 with a margin of one: (N, height, width).  kernel: (3, 3, C)."""
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(wide, (3, 3), axis=(2, 3))[:, :, :: stride[0], :: stride[1]]
    made: Array = np.einsum("nchwij,ijc->nhw", windows, kernel)
    return made


def spread(mask: Array, kernel: list[list[float]], stride: tuple[int, int]) -> Array:
    """The sum of a kernel put at each position of (N, height, width)."""
    sizes = [(mask.shape[1 + i] - 1) * stride[i] + one for i, one in enumerate(np.shape(kernel))]
    made = np.zeros((len(mask), *sizes), mask.dtype)
    for (i, j), factor in np.ndenumerate(np.asarray(kernel, mask.dtype)):
        rows, columns = (slice(at, at + (n - 1) * step + 1, step)
                         for at, n, step in zip((i, j), mask.shape[1:], stride, strict=True))  # fmt: skip
        made[:, rows, columns] += factor * mask
    return made


def padded(mask: Array, more: tuple[int, int]) -> Array:
    """With rows and columns of zeros behind."""
    return np.pad(mask, ((0, 0), (0, more[0]), (0, more[1])))

"""What masks are computed with on the host: arrays of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def plain(weight: Any) -> Array:
    """A weight as an array that masks are computed with, in float32 at least."""
    array = np.asarray(weight)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def as_mask(kept: Any, weight: Any) -> Any:
    """A mask of 0 and 1 in the weight's own type of what is true where a weight is kept."""
    return np.asarray(kept).astype(weight.dtype)


def row(arrays: Sequence[Array]) -> Array:
    """The elements of arrays one after another."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def lowest_dropped(scores: Array, count: int) -> Array:
    """Of scores in one row, false for the `count` lowest and true for others; equal ones from the first."""
    kept = np.ones(len(scores), bool)
    if count:
        highest = np.partition(scores, count - 1)[count - 1]
        below = scores < highest
        kept[below] = False
        kept[np.flatnonzero(scores == highest)[: count - int(below.sum())]] = False
    return kept


def ranks(values: Array) -> Array:
    """The rank of each value along the last axis, 0 for the lowest; equal ones from the first."""
    return np.argsort(np.argsort(values, -1, kind="stable"), -1)


def like(array: Array, other: Array) -> Array:
    """An array as the kind of another."""
    return array


def numbers(array: Any) -> Array:
    """An array of NumPy with the same content."""
    return np.asarray(array)


def stored(array: Any) -> Array:
    """A copy to be written into later."""
    return np.array(array)

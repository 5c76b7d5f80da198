"""Comparing what a program gives with what it gives without faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
from autoray import tree_iter
from numpy.typing import NDArray

from amanda.tools.inject._faults import InjectError
from amanda.tools.kit import tensors_of

Compare = Callable[[Any, Any], bool]
"""Says of an output, given after the one without faults, if it is corrupted; both are as `arrays`."""


def arrays(output: Any) -> Any:
    """Return what a program gave, with a copy as a NumPy array for each tensor.

    Mappings become dicts, and lists and tuples lists; other objects are copied.
    """
    if isinstance(output, Mapping):
        return {key: arrays(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [arrays(value) for value in output]
    if isinstance(output, (bool, int, float, complex)):
        return np.array(output)
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        return np.array(tensors_of(output).to_numpy(output))
    return copy.deepcopy(output)


def differs(golden: Any, output: Any) -> bool:
    """Return True if anything is different, bit by bit but for the sign of zero; NaN equals NaN."""
    return not _all(golden, output, _equal)


def differs_by(rtol: float = 1e-5, atol: float = 1e-8) -> Compare:
    """Return a comparison: True if any number is further off than `atol + rtol * abs(golden)`."""

    def close(one: NDArray[Any], other: NDArray[Any]) -> bool:
        return bool(np.allclose(other, one, rtol, atol, equal_nan=True))

    return lambda golden, output: not _all(golden, output, close)


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the index of the largest number along the last axis of the first array is another."""
    one, other = next(_arrays_in(golden), None), next(_arrays_in(output), None)
    if one is None:
        raise InjectError("top1_changed compares arrays; the program gives none")
    if other is None or one.shape != other.shape:
        return True
    return bool((one.argmax(-1) != other.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if NaN or Inf is where there was none."""
    for one, other in zip_longest(_arrays_in(golden), _arrays_in(output)):
        if other is not None and _has_nan(other):
            bad = ~np.isfinite(other)
            if one is not None and one.shape == other.shape and _has_nan(one):
                bad &= np.isfinite(one)
            if bad.any():
                return True
    return False


def _has_nan(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "fc"


def _arrays_in(output: Any) -> Iterator[NDArray[Any]]:
    return (one for one in tree_iter(output) if isinstance(one, np.ndarray))


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(np.array_equal(one, other, equal_nan=_has_nan(one) and _has_nan(other)))


def _all(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return True if two outputs have one structure, and arrays that are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_all(one[key], other[key], same) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_all(*pair, same) for pair in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and same(one, other)
    return bool(one == other)

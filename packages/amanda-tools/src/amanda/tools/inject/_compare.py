"""Comparison of the output of a program with the output without faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from amanda.options import NonNegativeFloat, checked
from amanda.tools.inject._faults import InjectError
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import tree_iter

if TYPE_CHECKING:
    from numpy.typing import NDArray

Compare = Callable[[Any, Any], bool]
"""Function of the output without faults and another, in the form of `arrays`; True for a corrupted one."""


def arrays(output: Any) -> Any:
    """Return a program's output, with each tensor copied to a NumPy array.

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
    """Return True if any number differs; NaN equals NaN, and 0.0 equals -0.0."""
    return not _all(golden, output, _equal)


@checked(error=InjectError)
def differs_by(rtol: NonNegativeFloat = 1e-5, atol: NonNegativeFloat = 1e-8) -> Compare:
    """Return a comparison that is True if any number differs by more than `atol + rtol * abs(golden)`."""

    def close(one: NDArray[Any], other: NDArray[Any]) -> bool:
        return bool(np.allclose(other, one, rtol, atol, equal_nan=True))

    return lambda golden, output: not _all(golden, output, close)


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the index of the largest number along the last axis of the first array has changed."""
    one, other = next(_arrays_in(golden), None), next(_arrays_in(output), None)
    if one is None:
        raise InjectError("top1_changed compares arrays; the program gives none")
    if other is None or one.shape != other.shape:
        return True
    return bool((one.argmax(-1) != other.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if there is NaN or Inf in the place of a finite number."""
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
    """Return True if two outputs have the same structure, and `same` holds for all arrays."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_all(one[key], other[key], same) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_all(*pair, same) for pair in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and same(one, other)
    return bool(one == other)

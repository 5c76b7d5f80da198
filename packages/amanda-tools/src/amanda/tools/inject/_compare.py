"""Comparing what a program gives with what it gives without faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.inject._faults import InjectError, as_numbers
from amanda.tools.kit import tensors_of

Compare = Callable[[Any, Any], bool]
"""Whether an output, given after the one without faults, is to be called corrupted; both are as `arrays`."""


def arrays(output: Any) -> Any:
    """What a program gave, with a copy as a NumPy array for each tensor.

    Mappings become dicts, and lists and tuples lists; other objects are copied.
    """
    if isinstance(output, Mapping):
        return {key: arrays(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [arrays(value) for value in output]
    if isinstance(output, (str, bytes, type(None))):
        return output
    if isinstance(output, (bool, int, float, complex, np.generic, np.ndarray)):
        return np.array(output)
    is_tensor = hasattr(output, "shape") and hasattr(output, "dtype")
    return as_numbers(tensors_of(output).exact(output)) if is_tensor else copy.deepcopy(output)


def differs(golden: Any, output: Any) -> bool:
    """Whether anything is different, bit by bit but for the sign of zero; NaN equals NaN."""
    return not _all(golden, output, _equal)


def differs_by(rtol: float = 1e-5, atol: float = 1e-8) -> Compare:
    """A comparison: whether any number is further off than `atol + rtol * abs(golden)`."""

    def compare(golden: Any, output: Any) -> bool:
        return not _all(
            golden, output, lambda one, other: bool(np.allclose(other, one, rtol, atol, equal_nan=True))
        )

    return compare


def top1_changed(golden: Any, output: Any) -> bool:
    """Whether the index of the largest number along the last axis of the first array is another anywhere."""
    one, other = next(_arrays_in(golden), None), next(_arrays_in(output), None)
    if one is None:
        raise InjectError("top1_changed compares arrays; the program gives none")
    if other is None or one.shape != other.shape:
        return True
    return bool((one.argmax(-1) != other.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Whether NaN or Inf is where there was none."""
    found = list(_arrays_in(output))
    pairs = zip(list(_arrays_in(golden)) + [None] * len(found), found, strict=False)
    for one, other in pairs:
        if other.dtype.kind not in "fc":
            continue
        bad = ~np.isfinite(other)
        if one is not None and one.shape == other.shape and one.dtype.kind in "fc":
            bad &= np.isfinite(one)
        if bad.any():
            return True
    return False


def _arrays_in(output: Any) -> Iterator[NDArray[Any]]:
    if isinstance(output, np.ndarray):
        yield output
    elif isinstance(output, (dict, list)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _arrays_in(value)


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc" and other.dtype.kind in "fc"))


def _all(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_all(one[key], other[key], same) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_all(*pair, same) for pair in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and same(one, other)
    return bool(one == other)

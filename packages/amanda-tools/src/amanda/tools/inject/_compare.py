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
    """Return a program's output with a copy as a NumPy array for each tensor.

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
    """Return True if anything is different, bit by bit but for the sign of zero; NaN equals NaN."""
    return not _agree(golden, output, _equal)


def differs_by(rtol: float = 1e-5, atol: float = 1e-8) -> Compare:
    """Return a comparison: whether any number is further off than `atol + rtol * abs(golden)`."""

    def compare(golden: Any, output: Any) -> bool:
        return not _agree(golden, output, lambda one, other: np.allclose(other, one, rtol, atol, True))

    return compare


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the largest number along the last axis of the first array is elsewhere in any row."""
    pairs = zip(_arrays_in(golden).values(), _arrays_in(output).values(), strict=False)
    one, other = next(pairs, (None, None))
    if one is None or other is None:
        raise InjectError("top1_changed compares arrays; the program gives none")
    if one.shape != other.shape:
        return True
    return bool((one.argmax(-1) != other.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if NaN or Inf is where there was none."""
    known = _arrays_in(golden)
    for path, found in _arrays_in(output).items():
        if found.dtype.kind not in "fc":
            continue
        bad, one = ~np.isfinite(found), known.get(path)
        if one is not None and one.shape == found.shape and one.dtype.kind in "fc":
            bad &= np.isfinite(one)
        if bad.any():
            return True
    return False


def _arrays_in(output: Any) -> dict[Any, NDArray[Any]]:
    return {path: one for path, one in _leaves(output) if isinstance(one, np.ndarray)}


def _leaves(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what is in dicts and lists, with the types of these and the keys that lead there."""
    if isinstance(output, (dict, list)):
        yield (*path, type(output)), len(output)
        for key, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from _leaves(value, (*path, key))
    else:
        yield path, output


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc" and other.dtype.kind in "fc")


def _agree(golden: Any, output: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return True if both have the same structure, and the same in it."""
    one, other = dict(_leaves(golden)), dict(_leaves(output))
    return one.keys() == other.keys() and all(_is_same(one[path], other[path], same) for path in one)


def _is_same(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and same(one, other)
    return bool(one == other)

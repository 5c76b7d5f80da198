"""Outputs of a program as arrays, and comparisons of two outputs."""

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


Compare = Callable[[Any, Any], "bool | str"]
"""Function of the output without faults and that of a trial, from `arrays`; returns True for corruption, or a
word for an outcome of its own."""


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
        # A copy: memory is restored after the run, and would change the output.
        return np.array(tensors_of(output).to_numpy(output))
    return copy.deepcopy(output)


def differs(golden: Any, output: Any) -> bool:
    """Return True if any number differs; NaN equals NaN, and 0.0 equals -0.0."""
    return not _all_agree(golden, output, _arrays_equal)


@checked(error=InjectError)
def differs_by(rtol: NonNegativeFloat = 1e-5, atol: NonNegativeFloat = 1e-8) -> Compare:
    """Return a comparison that is True if any number differs by more than `atol + rtol * abs(golden)`."""

    def close(golden_array: NDArray[Any], array: NDArray[Any]) -> bool:
        return bool(np.allclose(array, golden_array, rtol, atol, equal_nan=True))

    return lambda golden, output: not _all_agree(golden, output, close)


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the index of the largest number along the last axis of the first array has changed."""
    # The first array is the answer of most models: logits come before caches and hidden states.
    golden_array, array = next(arrays_in(golden), None), next(arrays_in(output), None)
    if golden_array is None:
        raise InjectError("top1_changed compares arrays; the output of the program has none")
    if array is None or golden_array.shape != array.shape:
        return True
    return bool((golden_array.argmax(-1) != array.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if NaN or Inf replaces a finite number."""
    for golden_array, array in zip_longest(arrays_in(golden), arrays_in(output)):
        # A number that was not finite without the fault is none of the fault's doing.
        if array is not None and _can_hold_nan(array):
            non_finite = ~np.isfinite(array)
            # With other shapes no element corresponds, so every NaN counts as new.
            if golden_array is not None and golden_array.shape == array.shape and _can_hold_nan(golden_array):
                non_finite &= np.isfinite(golden_array)
            if non_finite.any():
                return True
    return False


def _can_hold_nan(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "fc"


def arrays_in(output: Any) -> Iterator[NDArray[Any]]:
    return (array for array in tree_iter(output) if isinstance(array, np.ndarray))


def _arrays_equal(golden: NDArray[Any], output: NDArray[Any]) -> bool:
    # NumPy raises for `equal_nan` with types that have no NaN, such as texts.
    return bool(np.array_equal(golden, output, equal_nan=_can_hold_nan(golden) and _can_hold_nan(output)))


def _all_agree(golden: Any, output: Any, agree: Callable[[Any, Any], bool]) -> bool:
    """Return True if two outputs have the same structure, and `agree` holds for all arrays."""
    if type(golden) is not type(output):
        return False
    if isinstance(golden, dict):
        return golden.keys() == output.keys() and all(
            _all_agree(golden[key], output[key], agree) for key in golden
        )
    if isinstance(golden, list):
        return len(golden) == len(output) and all(
            _all_agree(*pair, agree) for pair in zip(golden, output, strict=True)
        )
    if isinstance(golden, np.ndarray):
        return golden.shape == output.shape and agree(golden, output)
    # Objects that were copied deeply, such as texts and configurations.
    return bool(golden == output)

"""Numbers of tensors of any framework, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.stats import Accumulator

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLED = 32
"""Numbers in a sample."""


def measured(tensors: Sequence[Any]) -> list[tuple[Sequence[float], NDArray[Any]]]:
    """Return of each tensor the numbers of its `Statistics`, and a sample in its element type."""
    accumulators = [Accumulator(None) for _ in tensors]
    Accumulator.add_all(zip(accumulators, tensors, strict=True))
    return [(one.vector(), _sample(tensor)) for one, tensor in zip(accumulators, tensors, strict=True)]


def array(tensor: Any) -> NDArray[Any] | None:
    """A copy of all numbers; None of a tensor that is not one array, or has no numbers."""
    tensors = tensors_of(tensor)
    dense = tensors.dense(tensor)
    return None if dense is None else tensors.exact(dense)


def _sample(tensor: Any) -> NDArray[Any]:
    """Return numbers at even distances in the order of indexing."""
    dense = tensor
    if not isinstance(dense, np.ndarray):
        tensors = tensors_of(tensor)
        dense = tensors.shared(tensor)
        if dense is None:
            dense = tensors.dense(tensor)
        size = 0 if dense is None else prod(tensors.extents(dense))
        if not size:
            return np.empty(0)
        if not isinstance(dense, np.ndarray):
            return tensors.exact(tensors.at(dense, _positions(size).tolist()))
    sample: NDArray[Any] = dense.reshape(-1)[_positions(dense.size)]
    return sample


@lru_cache(maxsize=1024)
def _positions(size: int) -> NDArray[np.int64]:
    count = min(size, SAMPLED)
    return np.arange(count) * (size - 1) // max(count - 1, 1)

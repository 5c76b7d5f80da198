"""Numbers of tensors of any framework, on the host."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from amanda.tools.dump._entry import Summary
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.stats import Accumulator

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLED = 32
"""Numbers in a sample."""


def summary(tensor: Any) -> Summary:
    """Statistics, and a sample."""
    accumulator = Accumulator(None)
    accumulator.add(tensor)
    sample = _sample(tensor)
    real = np.abs(sample) if np.iscomplexobj(sample) else sample
    return Summary(accumulator.statistics(), tuple(real.astype(np.float64).tolist()))


def array(tensor: Any) -> NDArray[Any] | None:
    """A copy of all numbers; None of a tensor that is not one array, or has no numbers."""
    tensors = tensors_of(tensor)
    dense = tensors.dense(tensor)
    return None if dense is None else tensors.exact(dense)


def _sample(tensor: Any) -> NDArray[Any]:
    tensors = tensors_of(tensor)
    dense = tensors.dense(tensor)
    size = 0 if dense is None else prod(tensors.extents(dense))
    if not size:
        return np.zeros(0)
    count = min(size, SAMPLED)
    return tensors.exact(tensors.at(dense, [i * (size - 1) // max(count - 1, 1) for i in range(count)]))

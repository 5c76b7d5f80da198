"""Statistics of arrays by NumPy, where no native code computes them.

The class has the face of `amanda.interceptor.Moments`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import Tensors
from amanda.tools.libraries import numpy as np
from amanda.tools.stats._sketch import LOWEST, Bins
from amanda.tools.stats._statistics import Statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class Moments:
    """Statistics of the numbers of arrays, computed in float64 by NumPy, and counts of their bins."""

    def __init__(self, bits: int = -1) -> None:
        self._bins = Bins(bits) if bits >= 0 else None
        self._sums = Statistics()
        self._counts: Array | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return the fields of `Statistics` in their order."""
        return tuple(vars(self._sums).values())

    @property
    def counts(self) -> bytes | None:
        """Return how many are in each bin, int64 in bytes; None where nothing was counted."""
        return None if self._counts is None else self._counts.tobytes()

    def add(self, array: Array) -> bool:
        """Take in the numbers of an array in one piece of memory; return False for another element type."""
        if array.dtype not in (np.float32, np.float64) or not array.dtype.isnative:
            return False
        row = array.reshape(-1)
        for start in range(0, len(row), Tensors.cached_block):
            with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN, sums of large numbers
                self._add(row[start : start + Tensors.cached_block].astype(np.float64))
        return True

    def _add(self, block: Array) -> None:
        finite = block if np.isfinite(block.sum()) else block[np.isfinite(block)]
        self._sums = self._sums.merged(_statistics(block, finite))
        if self._bins is not None:
            counts = np.bincount(_indices(finite, self._bins), minlength=self._bins.total)
            self._counts = counts if self._counts is None else self._counts + counts

    def merge(self, other: Moments) -> None:
        """Take in what another one, of the same bins, has taken in."""
        self._sums = self._sums.merged(other._sums)
        if other._counts is not None:
            self._counts = other._counts if self._counts is None else self._counts + other._counts


def _statistics(block: Array, finite: Array) -> Statistics:
    """Return those of a block, of whose numbers these are finite."""
    nan, inf, negative_inf, zeros = (
        int(np.count_nonzero(found))
        for found in (np.isnan(block), block == np.inf, block == -np.inf, finite == 0)
    )
    if not len(finite):
        return Statistics(nan=nan, inf=inf, negative_inf=negative_inf)
    mean = float(finite.mean())
    if not math.isfinite(mean):  # the sum overflows
        mean = float((finite / len(finite)).sum())
    return Statistics(
        len(finite), mean, float(np.square(finite - mean).sum()), float(np.abs(finite).sum()),
        float(finite.min()), float(finite.max()), nan, inf, negative_inf, zeros,
    )  # fmt: skip


def _indices(block: Array, bins: Bins) -> Array:
    """Return the bin of each element of a block of float64."""
    position = (np.abs(block).view(np.int64) >> (52 - bins.bits)) - (((1023 + LOWEST) << bins.bits) - 1)
    position = np.where(block == 0, 0, np.clip(position, 0, bins.side - 1) + 1)
    found: Array = bins.side + np.where(np.signbit(block), -position, position)
    return found

"""Medians with their uncertainty, by bootstrap."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
Values = Sequence[float] | NDArray[np.float64]


class Estimate(NamedTuple):
    """A median and the interval that holds 95 of 100 medians of resampled rounds."""

    middle: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """In another unit."""
        return Estimate(*(value * factor for value in self))


def median(values: Values) -> Estimate:
    """The median of independent values."""
    array = np.asarray(values, dtype=float)
    return _interval(float(np.median(array)), np.median(array[_resampled(len(array))], axis=1))


def difference(values: Values, base: Values) -> Estimate:
    """Median of what the values of each round have more than the base's."""
    return median(np.asarray(values) - np.asarray(base))


def quotient(values: Values, base: Values) -> Estimate:
    """Median of the values of each round over the base's."""
    return median(np.asarray(values) / np.asarray(base))


def quotient_of_differences(values: Values, reference: Values, base: Values) -> Estimate:
    """What the values have more than the base, over what the reference has more; rounds stay together."""
    above = np.asarray(values) - np.asarray(base)
    below = np.asarray(reference) - np.asarray(base)
    picked = _resampled(len(above))
    each = np.median(above[picked], axis=1) / np.median(below[picked], axis=1)
    return _interval(float(np.median(above) / np.median(below)), each)


def _resampled(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))


def _interval(middle: float, each: NDArray[np.float64]) -> Estimate:
    low, high = np.percentile(each, [2.5, 97.5])
    return Estimate(middle, float(low), float(high))

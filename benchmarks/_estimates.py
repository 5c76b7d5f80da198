"""Medians with their uncertainty, by bootstrap."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

Values = Sequence[float] | NDArray[np.float64]


class Estimate(NamedTuple):
    """A median and the interval that holds 95 of 100 medians of resampled rounds."""

    middle: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """Return the estimate in another unit."""
        return Estimate(*(value * factor for value in self))

    def __format__(self, digits: str) -> str:
        return f"{self.middle:{digits}} {self.span(digits)}"

    def text(self, digits: str, unit: str) -> str:
        """Return the estimate with a unit, and the interval."""
        return f"{self.middle:{digits}} {unit} {self.span(digits)}"

    def span(self, digits: str) -> str:
        """Return the interval in brackets."""
        return f"[{self.low:{digits}}, {self.high:{digits}}]"


def median(values: Values) -> Estimate:
    """Return the median of independent values."""
    return _estimate(np.median, np.asarray(values, dtype=float))


def difference(values: Values, base: Values) -> Estimate:
    """Return the median of the values of each round less the base's."""
    return median(np.asarray(values) - np.asarray(base))


def quotient(values: Values, base: Values) -> Estimate:
    """Return the median of the values of each round over the base's; of other rounds, over its median."""
    return median(np.asarray(values) / np.asarray(base if len(values) == len(base) else np.median(base)))


def percent(values: Values, base: Values) -> Estimate:
    """Return the median of what the values of each round add to the base's, in percent of those."""
    return Estimate(*(100 * (value - 1) for value in quotient(values, base)))


def quotient_of_differences(values: Values, reference: Values, base: Values) -> Estimate:
    """Return the median that the values add to the base over that of the reference; rounds stay together."""

    def statistic(above: Any, below: Any, axis: int = -1) -> Any:
        return np.median(above, axis) / np.median(below, axis)

    return _estimate(
        statistic, np.asarray(values) - np.asarray(base), np.asarray(reference) - np.asarray(base)
    )


def _estimate(statistic: Callable[..., Any], *samples: NDArray[np.float64]) -> Estimate:
    middle = float(statistic(*samples))
    if len(samples[0]) == 1:  # of a quick run
        return Estimate(middle, middle, middle)
    found = bootstrap(
        samples,
        statistic,
        n_resamples=2000,
        method="percentile",
        paired=len(samples) > 1,
        rng=np.random.default_rng(0),
    )
    return Estimate(middle, *map(float, found.confidence_interval))

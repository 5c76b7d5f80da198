"""A histogram whose range grows, and the range that quantises its values best."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_UPSAMPLING = 16
_STEP = 1e-5
_LARGE = 1e9
_F = np.float32


class Histogram:
    """Counts in bins of equal width between the least and the largest number so far, both finite.

    Source: torch.ao.quantization.observer.HistogramObserver of PyTorch 2.13, in float32 as there.
    """

    def __init__(self, bins: int = 2048) -> None:
        self.bins = bins
        self.counts: NDArray[Any] = np.zeros(bins, _F)
        self.least, self.most = _F(np.inf), _F(-np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Add finite numbers."""
        values = values.reshape(-1).astype(_F, copy=False)
        least, most = min(self.least, values.min()), max(self.most, values.max())
        added = _counted(values, self.bins, least, most)
        if self.least > self.most:
            self.counts = added
        elif (least, most) == (self.least, self.most):
            self.counts = self.counts + added
        else:
            self.counts = self._in_range(least, most) + added
        self.least, self.most = least, most

    def _in_range(self, least: Any, most: Any) -> NDArray[Any]:
        """Return the counts, moved to the bins of a wider range."""
        if self.least == self.most:
            return np.asarray(_counted(np.array([self.least]), self.bins, least, most) * self.counts.sum())
        fine = self.bins * _UPSAMPLING
        counts = np.repeat(self.counts, _UPSAMPLING) / _F(_UPSAMPLING)
        middles = _linspace(self.least, self.most, fine + 1)[:-1] + _F(0.5) * (
            (self.most - self.least) / _F(fine)
        )
        bounds = _linspace(least, most, self.bins + 1)
        place = np.clip(np.searchsorted(bounds, middles, side="right") - 1, 0, self.bins - 1)
        return np.asarray(np.bincount(place, counts, self.bins), _F)

    @property
    def middles(self) -> NDArray[Any]:
        """Return the numbers in the middle of each bin."""
        width = (np.float64(self.most) - self.least) / self.bins
        return np.asarray(self.least + width * (np.arange(self.bins) + 0.5))

    def best_range(self, levels: int = 256) -> tuple[Any, Any]:
        """Return the bounds between which so many levels have the least squared error.

        The search drops bins at the end with fewer numbers, as long as the error shrinks.
        """
        widest = max(-float(self.least), float(self.most))
        if widest > _LARGE:  # float32 does not hold the cubes
            unit = Histogram(self.bins)
            unit.counts, unit.least, unit.most = self.counts, _F(self.least / widest), _F(self.most / widest)
            least, most = unit.best_range(levels)
            return _F(float(least) * widest), _F(float(most) * widest)
        total, sums = float(self.counts.sum()), np.cumsum(self.counts, dtype=_F)
        begin, end, lower, upper = 0, self.bins - 1, 0.0, 1.0
        error = np.inf
        while lower < upper:
            next_lower, next_upper = lower + _STEP, upper - _STEP
            left = min(max(begin, int(np.searchsorted(sums, _F(next_lower * total)))), end)
            right = max(min(end, int(np.searchsorted(sums, _F(next_upper * total), "right")) - 1), begin)
            if left - begin > end - right:
                proposed, lower = (left, end), next_lower
            else:
                proposed, upper = (begin, right), next_upper
            if proposed == (begin, end):
                continue
            found = self._error(*proposed, levels)
            if found > error:
                break
            error, (begin, end) = found, proposed
        width = (self.most - self.least) / _F(self.bins)
        return self.least + width * _F(begin), self.least + width * _F(end + 1)

    def _error(self, begin: int, end: int, levels: int) -> float:
        """Return the squared error of numbers spread evenly over their bins, with levels between two bins."""
        width = (float(self.most) - float(self.least)) / self.bins
        step = width * (end - begin + 1) / levels
        if step == 0:
            return 0.0
        starts = (np.arange(self.bins) - begin).astype(_F) * _F(width)
        ends = starts + _F(width)
        first, last = (np.clip(np.floor(one / _F(step)), 0, levels - 1) for one in (starts, ends))
        density = self.counts / _F(width)
        half = _F(step / 2)
        error = _integral(starts - (first + _F(0.5)) * _F(step), half, density)
        error += (last - first - 1) * _integral(-half, half, density)
        error += _integral(-half, ends - (last * _F(step) + half), density)
        return float(error.sum())


def _integral(begin: Any, end: Any, density: NDArray[Any]) -> NDArray[Any]:
    """Return the integral of density times x squared."""
    return np.asarray(density * ((end * end * end - begin * begin * begin) / _F(3)))


def _counted(values: NDArray[Any], bins: int, least: Any, most: Any) -> NDArray[Any]:
    """Return the number of values in each bin between two bounds, as torch.histc does."""
    if least == most:
        least, most = least - _F(1), most + _F(1)
    if float(most) - float(least) > np.finfo(_F).max / bins:  # the end of float32 is near
        values, least, most = (np.asarray(one, np.float64) for one in (values, least, most))
    place = ((values - least) * bins / (most - least)).astype(np.int64)
    return np.bincount(np.minimum(place, bins - 1), minlength=bins).astype(_F)


def _linspace(begin: Any, end: Any, count: int) -> NDArray[Any]:
    """Return numbers at equal distances, from both ends as torch.linspace computes them."""
    step = (end - begin) / _F(count - 1)
    places = np.arange(count)
    upwards = begin + step * places.astype(_F)
    downwards = end - step * (count - 1 - places).astype(_F)
    return np.asarray(np.where(places < count // 2, upwards, downwards), _F)

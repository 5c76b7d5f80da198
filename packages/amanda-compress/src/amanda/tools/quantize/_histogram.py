"""A histogram whose range grows, and the range that quantises its values best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from amanda.options import Range, checked
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UPSAMPLING = 16
_STEP = 1e-5
_LARGE = 1e9


class Histogram:
    """Counts in bins of equal width between the least and the largest number so far, both finite.

    Source: torch.ao.quantization.observer.HistogramObserver of PyTorch 2.13, in float32 as there.
    """

    @checked
    def __init__(self, bins: Annotated[int, Range(1, 1 << 24)] = 2048) -> None:
        self.bins = bins
        self.counts: NDArray[Any] = np.zeros(bins, np.float32)
        self.least, self.most = np.float32(np.inf), np.float32(-np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Add finite numbers."""
        values = values.reshape(-1).astype(np.float32, copy=False)
        least, most = min(self.least, values.min()), max(self.most, values.max())
        added = _bin_counts(values, self.bins, least, most)
        if self.least > self.most:
            self.counts = added
        elif (least, most) == (self.least, self.most):
            self.counts = self.counts + added
        else:
            self.counts = self._rebinned(least, most) + added
        self.least, self.most = least, most

    def _rebinned(self, least: Any, most: Any) -> NDArray[Any]:
        """Return the counts, moved to the bins of a wider range."""
        if self.least == self.most:
            return np.asarray(_bin_counts(np.array([self.least]), self.bins, least, most) * self.counts.sum())
        fine = self.bins * _UPSAMPLING
        counts = np.repeat(self.counts, _UPSAMPLING) / np.float32(_UPSAMPLING)
        middles = _linspace(self.least, self.most, fine + 1)[:-1] + np.float32(0.5) * (
            (self.most - self.least) / np.float32(fine)
        )
        bounds = _linspace(least, most, self.bins + 1)
        place = np.clip(np.searchsorted(bounds, middles, side="right") - 1, 0, self.bins - 1)
        return np.asarray(np.bincount(place, counts, self.bins), np.float32)

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
            unit.counts, unit.least, unit.most = (
                self.counts,
                np.float32(self.least / widest),
                np.float32(self.most / widest),
            )
            least, most = unit.best_range(levels)
            return np.float32(float(least) * widest), np.float32(float(most) * widest)
        total, sums = float(self.counts.sum()), np.cumsum(self.counts, dtype=np.float32)
        begin, end, lower, upper = 0, self.bins - 1, 0.0, 1.0
        error = np.inf
        while lower < upper:
            next_lower, next_upper = lower + _STEP, upper - _STEP
            low_bin = min(max(begin, int(np.searchsorted(sums, np.float32(next_lower * total)))), end)
            high_bin = max(
                min(end, int(np.searchsorted(sums, np.float32(next_upper * total), "right")) - 1), begin
            )
            if low_bin - begin > end - high_bin:
                proposed, lower = (low_bin, end), next_lower
            else:
                proposed, upper = (begin, high_bin), next_upper
            if proposed == (begin, end):
                continue
            proposed_error = self._squared_error(*proposed, levels)
            if proposed_error > error:
                break
            error, (begin, end) = proposed_error, proposed
        width = (self.most - self.least) / np.float32(self.bins)
        return self.least + width * np.float32(begin), self.least + width * np.float32(end + 1)

    def _squared_error(self, begin: int, end: int, levels: int) -> float:
        """Return the squared error of numbers spread evenly over their bins, with levels between two bins."""
        width = (float(self.most) - float(self.least)) / self.bins
        step = width * (end - begin + 1) / levels
        if step == 0:
            return 0.0
        starts = (np.arange(self.bins) - begin).astype(np.float32) * np.float32(width)
        ends = starts + np.float32(width)
        first, last = (np.clip(np.floor(edges / np.float32(step)), 0, levels - 1) for edges in (starts, ends))
        density = self.counts / np.float32(width)
        half = np.float32(step / 2)
        error = _integral(starts - (first + np.float32(0.5)) * np.float32(step), half, density)
        error += (last - first - 1) * _integral(-half, half, density)
        error += _integral(-half, ends - (last * np.float32(step) + half), density)
        return float(error.sum())


def _integral(begin: Any, end: Any, density: NDArray[Any]) -> NDArray[Any]:
    """Return the integral of density times x squared."""
    return np.asarray(density * ((end * end * end - begin * begin * begin) / np.float32(3)))


def _bin_counts(values: NDArray[Any], bins: int, least: Any, most: Any) -> NDArray[Any]:
    """Return the number of values in each bin between two bounds, as torch.histc does."""
    if least == most:
        least, most = least - np.float32(1), most + np.float32(1)
    if float(most) - float(least) > np.finfo(np.float32).max / bins:  # the end of float32 is near
        values, least, most = (np.asarray(array, np.float64) for array in (values, least, most))
    place = ((values - least) * bins / (most - least)).astype(np.int64)
    return np.bincount(np.minimum(place, bins - 1), minlength=bins).astype(np.float32)


def _linspace(begin: Any, end: Any, count: int) -> NDArray[Any]:
    """Return numbers at equal distances, from both ends as torch.linspace computes them."""
    step = (end - begin) / np.float32(count - 1)
    places = np.arange(count)
    upwards = begin + step * places.astype(np.float32)
    downwards = end - step * (count - 1 - places).astype(np.float32)
    return np.asarray(np.where(places < count // 2, upwards, downwards), np.float32)

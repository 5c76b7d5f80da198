"""Observers: the range of a tensor over batches, by extremes, percentiles, errors or a histogram."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from amanda.options import PositiveInt, Range, checked
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import (
    Grid,
    QuantizeError,
    Rounding,
    as_array,
    choose_qparams,
    fake_quantize,
    flatten_channels,
    other_axes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


_UPSAMPLING = 16  # parts of an old bin that move to new bins, as in torch.ao
_DROPPED_SHARE = 1e-5  # share of the numbers that a step of the search drops, as in torch.ao
_LARGE = 1e9  # float32 does not hold the cubes of larger numbers


class Histogram:
    """Counts of numbers in bins of equal width between the least and the largest number so far.

    Source: torch.ao.quantization.observer.HistogramObserver of PyTorch 2.13, in float32 as there.
    """

    @checked
    def __init__(self, bins: Annotated[int, Range(1, 1 << 24)] = 2048) -> None:
        self.bins = bins
        self.counts: NDArray[Any] = np.zeros(bins, np.float32)
        self.least, self.most = np.float32(np.inf), np.float32(-np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Add finite numbers of any shape; the range widens to hold them."""
        values = values.reshape(-1).astype(np.float32, copy=False)
        # float32 and the order of these operations follow torch.ao, whose ranges are compared bit for bit.
        least, most = min(self.least, values.min()), max(self.most, values.max())
        new_counts = _bin_counts(values, self.bins, least, most)
        # Infinite bounds, the least one above the other, are those before the first batch.
        if self.least > self.most:
            self.counts = new_counts
        elif (least, most) == (self.least, self.most):
            self.counts = self.counts + new_counts
        else:
            self.counts = self._rebinned_counts(least, most) + new_counts
        self.least, self.most = least, most

    def _rebinned_counts(self, least: Any, most: Any) -> NDArray[Any]:
        """Return the counts in the bins of a wider range; old bins are split among the new ones."""
        # So far all numbers were equal, and lie in one bin.
        if self.least == self.most:
            return np.asarray(_bin_counts(np.array([self.least]), self.bins, least, most) * self.counts.sum())
        # Parts of old bins move to the new bins of their middles, as in torch.ao.
        fine_bins = self.bins * _UPSAMPLING
        counts = np.repeat(self.counts, _UPSAMPLING) / np.float32(_UPSAMPLING)
        middles = _linspace(self.least, self.most, fine_bins + 1)[:-1] + np.float32(0.5) * (
            (self.most - self.least) / np.float32(fine_bins)
        )
        bounds = _linspace(least, most, self.bins + 1)
        indices = np.clip(np.searchsorted(bounds, middles, side="right") - 1, 0, self.bins - 1)
        return np.asarray(np.bincount(indices, counts, self.bins), np.float32)

    @property
    def middles(self) -> NDArray[Any]:
        """Return the numbers in the middle of each bin."""
        width = (np.float64(self.most) - self.least) / self.bins
        return np.asarray(self.least + width * (np.arange(self.bins) + 0.5))

    def best_range(self, levels: int = 256) -> tuple[Any, Any]:
        """Return the range in which `levels` equidistant levels have the least squared error.

        The search drops bins at the end with fewer numbers while the error shrinks.
        """
        largest = max(-float(self.least), float(self.most))
        if largest > _LARGE:
            return self._best_range_scaled(levels, largest)
        total, sums = float(self.counts.sum()), np.cumsum(self.counts, dtype=np.float32)
        # A greedy search from both ends, which drops the side with the larger step in bins.
        first_bin, last_bin = 0, self.bins - 1  # of the range
        lower, upper = 0.0, 1.0  # shares of the numbers below the range, and below its end
        error = np.inf
        while lower < upper:
            next_lower, next_upper = lower + _DROPPED_SHARE, upper - _DROPPED_SHARE
            low_bin = int(np.searchsorted(sums, np.float32(next_lower * total)))
            high_bin = int(np.searchsorted(sums, np.float32(next_upper * total), "right")) - 1
            low_bin = min(max(first_bin, low_bin), last_bin)
            high_bin = max(min(last_bin, high_bin), first_bin)
            if low_bin - first_bin > last_bin - high_bin:
                proposed_bins, lower = (low_bin, last_bin), next_lower
            else:
                proposed_bins, upper = (first_bin, high_bin), next_upper
            # The share of a step lies within one bin: the next step may leave it.
            if proposed_bins == (first_bin, last_bin):
                continue
            proposed_error = self._quantisation_error(*proposed_bins, levels)
            # The first rise ends the search, as in torch.ao, though a lower error may lie behind it.
            if proposed_error > error:
                break
            error, (first_bin, last_bin) = proposed_error, proposed_bins
        width = (self.most - self.least) / np.float32(self.bins)
        return self.least + width * np.float32(first_bin), self.least + width * np.float32(last_bin + 1)

    def _best_range_scaled(self, levels: int, largest: float) -> tuple[Any, Any]:
        """Return the best range, searched with all numbers divided by the largest magnitude."""
        scaled = Histogram(self.bins)
        scaled.counts = self.counts
        scaled.least, scaled.most = np.float32(self.least / largest), np.float32(self.most / largest)
        least, most = scaled.best_range(levels)
        return np.float32(float(least) * largest), np.float32(float(most) * largest)

    def _quantisation_error(self, first_bin: int, last_bin: int, levels: int) -> float:
        """Return the squared error of rounding to equidistant levels that span the bins from first to last.

        Numbers outside are rounded to the first or last level.
        """
        width = (float(self.most) - float(self.least)) / self.bins
        step = width * (last_bin - first_bin + 1) / levels
        if step == 0:
            return 0.0
        # The ends of each bin, and the levels in whose reach they lie.
        starts = (np.arange(self.bins) - first_bin).astype(np.float32) * np.float32(width)
        ends = starts + np.float32(width)
        first_levels = np.clip(np.floor(starts / np.float32(step)), 0, levels - 1)
        last_levels = np.clip(np.floor(ends / np.float32(step)), 0, levels - 1)
        # Numbers are taken as spread evenly over a bin.
        density = self.counts / np.float32(width)
        half = np.float32(step / 2)
        first_centres = (first_levels + np.float32(0.5)) * np.float32(step)
        last_centres = last_levels * np.float32(step) + half
        # Of each bin: the part nearest to its first level, whole steps between, the part of its last level.
        # A bin within one step has -1 steps between, which corrects the sum of the two parts.
        error = _integral(starts - first_centres, half, density)
        error += (last_levels - first_levels - 1) * _integral(-half, half, density)
        error += _integral(-half, ends - last_centres, density)
        return float(error.sum())


def _integral(begin: Any, end: Any, density: NDArray[Any]) -> NDArray[Any]:
    """Return the integral of density times x squared: the error of numbers from begin to end of a level."""
    return np.asarray(density * ((end * end * end - begin * begin * begin) / np.float32(3)))


def _bin_counts(values: NDArray[Any], bins: int, least: Any, most: Any) -> NDArray[Any]:
    """Return the number of values in each bin between two bounds, as torch.histc does.

    Equal bounds are widened by 1 on both sides.
    """
    if least == most:
        least, most = least - np.float32(1), most + np.float32(1)
    if float(most) - float(least) > np.finfo(np.float32).max / bins:  # the end of float32 is near
        values, least, most = (np.asarray(array, np.float64) for array in (values, least, most))
    # A product before the quotient, as torch.histc rounds.
    indices = ((values - least) * bins / (most - least)).astype(np.int64)
    return np.bincount(np.minimum(indices, bins - 1), minlength=bins).astype(np.float32)


def _linspace(begin: Any, end: Any, count: int) -> NDArray[Any]:
    """Return `count` numbers at equal distances, from begin to end, bit-equal to torch.linspace."""
    step = (end - begin) / np.float32(count - 1)
    indices = np.arange(count)
    upwards = begin + step * indices.astype(np.float32)
    downwards = end - step * (count - 1 - indices).astype(np.float32)
    # torch.linspace counts from both ends, so that both are exact.
    return np.asarray(np.where(indices < count // 2, upwards, downwards), np.float32)


Bins: TypeAlias = Annotated[int, Range(1, 1 << 24)]
ObserverName = Literal["minmax", "percentile", "mse", "histogram"]


def extremes(x: Any, axes: Sequence[int] = ()) -> tuple[Any, Any]:
    """Return the least and the largest number of a tensor, in float32: scalars, or (channels,).

    Args:
        x: Of any framework and shape.
        axes: Axes of the channels; () for the extremes of all numbers.
    """
    xp = tensors_of(x)
    least, most = xp.extent(xp.wide(x), other_axes(x, axes))
    return flatten_channels(least, axes), flatten_channels(most, axes)


class Observer(ABC):
    """Base class of observers, which choose a range in float32 for tensors of any framework.

    seen: the number of batches.
    """

    seen = 0

    def observe(self, x: Any) -> None:
        """Add one batch, unless it is empty.

        Args:
            x: Values of the batch, of any framework.

        Raises:
            QuantizeError: For NaN or Inf in the batch.
        """
        array = as_array(x)
        # A batch without elements, as where data choose no expert, says nothing about the range.
        if not array.size:
            return
        # One Inf would make the range infinite for good.
        if not np.isfinite(array).all():
            raise QuantizeError(f"NaN or Inf among the values to be quantised, of shape {array.shape}")
        self.seen += 1
        self._add(array)

    @abstractmethod
    def _add(self, array: NDArray[Any]) -> None:
        """Add a batch that has elements, all of them finite."""

    @abstractmethod
    def range(self) -> tuple[Any, Any]:
        """Return the least and the largest number to represent: scalars, or (channels,)."""


class MinMaxObserver(Observer):
    """Range from the extremes of all batches; torch.ao's MinMaxObserver and PerChannelMinMaxObserver."""

    @checked(error=QuantizeError)
    def __init__(self, axes: Sequence[int] = ()) -> None:
        self._axes = tuple(axes)
        self._least, self._most = np.asarray(np.inf, np.float32), np.asarray(-np.inf, np.float32)

    def _add(self, array: NDArray[Any]) -> None:
        least, most = extremes(array, self._axes)
        self._least = np.asarray(np.minimum(least, self._least), np.float32)
        self._most = np.asarray(np.maximum(most, self._most), np.float32)

    def range(self) -> tuple[Any, Any]:
        """Return the least and the largest number of all batches."""
        return self._least, self._most


class HistogramObserver(Observer):
    """Range with the least squared error in a histogram of all batches; torch.ao's HistogramObserver.

    Args:
        bins: Number of bins of the histogram.
        levels: The number of integers of the grid.  torch.ao's observer takes 256 also where quant_min and
            quant_max leave fewer.
    """

    @checked(error=QuantizeError)
    def __init__(self, bins: Bins = 2048, levels: PositiveInt = 256) -> None:
        self.histogram, self._levels = Histogram(bins), levels

    def _add(self, array: NDArray[Any]) -> None:
        self.histogram.add(array)

    def range(self) -> tuple[Any, Any]:
        """Return the bounds that `Histogram.best_range` finds."""
        return self.histogram.best_range(self._levels)


class PercentileObserver(HistogramObserver):
    """Range from percentile 100 - `percentile` to `percentile` of all batches, to the width of a bin.

    Args:
        percentile: Above 50, at most 100.
        bins: Number of bins of the histogram.
    """

    @checked(error=QuantizeError)
    def __init__(
        self, percentile: Annotated[float, Range(above=50, most=100)] = 99.99, bins: Bins = 2048
    ) -> None:
        super().__init__(bins)
        self._share = percentile / 100

    def range(self) -> tuple[Any, Any]:
        """Return the two percentiles, each at the outer bound of its bin."""
        histogram, sums = self.histogram, np.cumsum(self.histogram.counts, dtype=np.float64)
        bounds = np.linspace(histogram.least, histogram.most, histogram.bins + 1)
        # `side` keeps both percentiles within the bins that hold them.
        low_bin = int(np.searchsorted(sums, (1 - self._share) * sums[-1], side="right"))
        high_bin = int(np.searchsorted(sums, self._share * sums[-1], side="left"))
        last_bin = histogram.bins - 1
        return np.float32(bounds[min(low_bin, last_bin)]), np.float32(bounds[min(high_bin, last_bin) + 1])


class MseObserver(HistogramObserver):
    """Range with the least mean squared error of fake quantisation, of 81 ranges within the extremes.

    The extremes are shrunk to 100 %, 99 %, ... 20 %.  Source: Nagel et al. 2021, sec. 3.1.

    Args:
        grid: Numbers of the quantised type.
        rounding: As in `fake_quantize`.
        bins: Number of bins of the histogram.
    """

    @checked(error=QuantizeError)
    def __init__(self, grid: Grid, rounding: Rounding = "half_even", bins: Bins = 2048) -> None:
        super().__init__(bins)
        self._grid, self._rounding = grid, rounding

    def range(self) -> tuple[Any, Any]:
        """Return the range with the least error."""
        histogram, least_error = self.histogram, np.inf
        # Middles of bins instead of values: a calibration stores 2048 numbers, however many batches it has.
        x, best_range = histogram.middles.astype(np.float32), (histogram.least, histogram.most)
        for share in np.linspace(1.0, 0.2, 81).astype(np.float32):
            least = np.asarray(histogram.least, np.float32) * share
            most = np.asarray(histogram.most, np.float32) * share
            qparams = choose_qparams(least, most, self._grid, self._rounding)
            quantised = fake_quantize(x, *qparams, self._grid, axes=(), rounding=self._rounding)
            error = float((np.square(quantised - x, dtype=np.float64) * histogram.counts).sum())
            if error < least_error:
                least_error, best_range = error, (least, most)
        return best_range


class PerChannelObserver(Observer):
    """Ranges by channel: a separate observer for each channel.

    Args:
        make: Function that returns a new observer.
        axes: Of the channels; several axes count as one, the last varies fastest.
    """

    @checked(error=QuantizeError)
    def __init__(self, make: Callable[[], Observer], axes: Sequence[int]) -> None:
        self._make, self._axes = make, tuple(axes)
        self._channels: list[Observer] = []

    def _add(self, array: NDArray[Any]) -> None:
        """Add the numbers of each channel to the channel's observer."""
        rows = np.moveaxis(array, self._axes, range(len(self._axes)))
        rows = rows.reshape(int(np.prod(rows.shape[: len(self._axes)])), -1)
        if not self._channels:
            self._channels = [self._make() for _ in rows]
        for channel, row in zip(self._channels, rows, strict=True):
            channel.observe(row)

    def range(self) -> tuple[Any, Any]:
        """Return the range of each channel."""
        ranges = [channel.range() for channel in self._channels]
        least, most = np.array(ranges, np.float32).T
        return least, most


@checked(error=QuantizeError)
def make_observer(
    name: ObserverName, grid: Grid, axes: Sequence[int] = (), rounding: Rounding = "half_even",
    percentile: Annotated[float, Range(above=50, most=100)] = 99.99,
) -> Observer:  # fmt: skip
    """Return a new observer by name.

    Args:
        name: "minmax", "percentile", "mse" or "histogram".
        grid: Numbers of the quantised type.
        axes: Axes of the channels, each of which has a range; () for one range.
        rounding: Of "mse", as in `fake_quantize`.
        percentile: Of "percentile", above 50.
    """
    return new_observer(name, grid, axes, rounding, percentile)


def new_observer(
    name: ObserverName, grid: Grid, axes: Sequence[int], rounding: Rounding, percentile: float
) -> Observer:
    """Return an observer as `make_observer` does, for options that have been checked."""
    # Extremes of all channels come from one reduction; other observers need one object for each channel.
    if name == "minmax":
        return MinMaxObserver(axes)
    makers: dict[str, Callable[[], Observer]] = {
        "percentile": lambda: PercentileObserver(percentile),
        "mse": lambda: MseObserver(grid, rounding),
        "histogram": lambda: HistogramObserver(levels=grid.high - grid.low + 1),
    }
    return PerChannelObserver(makers[name], axes) if axes else makers[name]()

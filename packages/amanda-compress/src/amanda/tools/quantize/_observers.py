"""Observers, which find the range of a tensor over batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from amanda.options import PositiveInt, Range, checked
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake import fake_quantize
from amanda.tools.quantize._grid import (
    Grid,
    QuantizeError,
    Rounding,
    as_array,
    choose_qparams,
    flattened,
    other_axes,
)
from amanda.tools.quantize._histogram import Histogram

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bins: TypeAlias = Annotated[int, Range(1, 1 << 24)]
ObserverName = Literal["minmax", "percentile", "mse", "histogram"]


def extremes(x: Any, axes: Sequence[int] = ()) -> tuple[Any, Any]:
    """Return the least and the largest number of a tensor, in float32: scalars, or (channels,)."""
    xp = tensors_of(x)
    least, most = xp.extent(xp.wide(x), other_axes(x, axes))
    return flattened(least, axes), flattened(most, axes)


class Observer(ABC):
    """Base of observers: takes tensors of any framework, and gives a range in float32.

    seen: the number of batches.
    """

    seen = 0

    def observe(self, x: Any) -> None:
        """Add one batch, unless it is empty.

        Raises QuantizeError for NaN or Inf in the batch.
        """
        array = as_array(x)
        if not array.size:
            return
        if not np.isfinite(array).all():
            raise QuantizeError(f"NaN or Inf among the values to be quantised, of shape {array.shape}")
        self.seen += 1
        self._add(array)

    @abstractmethod
    def _add(self, array: NDArray[Any]) -> None: ...

    @abstractmethod
    def range(self) -> tuple[Any, Any]:
        """Return the least and the largest number to represent: scalars, or (channels,)."""


class MinMaxObserver(Observer):
    """The extremes of all batches; torch.ao's MinMaxObserver and PerChannelMinMaxObserver."""

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
    """The range with the least squared error in a histogram of all batches; torch.ao's HistogramObserver.

    levels: the number of integers of the grid.  torch.ao's observer takes 256 also where quant_min and
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
    """Percentiles 100 - `percentile` and `percentile` of all batches, to the width of a bin."""

    @checked(error=QuantizeError)
    def __init__(
        self, percentile: Annotated[float, Range(above=50, most=100)] = 99.99, bins: Bins = 2048
    ) -> None:
        super().__init__(bins)
        self._share = percentile / 100

    def range(self) -> tuple[Any, Any]:
        """Return the two percentiles."""
        histogram, sums = self.histogram, np.cumsum(self.histogram.counts, dtype=np.float64)
        bounds = np.linspace(histogram.least, histogram.most, histogram.bins + 1)
        low = int(np.searchsorted(sums, (1 - self._share) * sums[-1], side="right"))
        high = int(np.searchsorted(sums, self._share * sums[-1], side="left"))
        return np.float32(bounds[min(low, histogram.bins - 1)]), np.float32(
            bounds[min(high, histogram.bins - 1) + 1]
        )


class MseObserver(HistogramObserver):
    """The range whose fake quantisation has the least mean squared error, of 81 that shrink the extremes.

    The extremes are shrunk to 100 %, 99 %, ... 20 %.  Source: Nagel et al. 2021, sec. 3.1.
    """

    @checked(error=QuantizeError)
    def __init__(self, grid: Grid, rounding: Rounding = "half_even", bins: Bins = 2048) -> None:
        super().__init__(bins)
        self._grid, self._rounding = grid, rounding

    def range(self) -> tuple[Any, Any]:
        """Return the range with the least error."""
        histogram, best = self.histogram, np.inf
        x, range_ = histogram.middles.astype(np.float32), (histogram.least, histogram.most)
        for share in np.linspace(1.0, 0.2, 81).astype(np.float32):
            least, most = (
                np.asarray(bound, np.float32) * share for bound in (histogram.least, histogram.most)
            )
            qparams = choose_qparams(least, most, self._grid, self._rounding)
            quantised = fake_quantize(x, *qparams, self._grid, (), self._rounding)
            error = float((np.square(quantised - x, dtype=np.float64) * histogram.counts).sum())
            if error < best:
                best, range_ = error, (least, most)
        return range_


class PerChannelObserver(Observer):
    """One observer for each channel.

    axes: of the channels; several are taken together, the last varies fastest.
    """

    @checked(error=QuantizeError)
    def __init__(self, make: Callable[[], Observer], axes: Sequence[int]) -> None:
        self._make, self._axes = make, tuple(axes)
        self._channels: list[Observer] = []

    def _add(self, array: NDArray[Any]) -> None:
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
    """Return a new observer by name; with axes, one that observes each channel apart."""
    if name == "minmax":
        return MinMaxObserver(axes)
    makers: dict[str, Callable[[], Observer]] = {
        "percentile": lambda: PercentileObserver(percentile),
        "mse": lambda: MseObserver(grid, rounding),
        "histogram": lambda: HistogramObserver(levels=grid.high - grid.low + 1),
    }
    return PerChannelObserver(makers[name], axes) if axes else makers[name]()

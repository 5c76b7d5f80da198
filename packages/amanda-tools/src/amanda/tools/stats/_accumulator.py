"""Statistics of a stream of tensors, computed where the tensors are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.tools.kit import Tensors, tensors_of
from amanda.tools.libraries import astype, do, get_dtype_name
from amanda.tools.libraries import numpy as np
from amanda.tools.stats._statistics import LOWEST, Bins, Sketch, Statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class NumpyMoments:
    """Statistics of the numbers of arrays, computed in float64 by NumPy, and counts of their bins."""

    def __init__(self, bits: int = -1) -> None:
        self._bins = Bins(bits) if bits >= 0 else None
        self._statistics = Statistics()
        self._bin_counts: Array | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return the fields of `Statistics` in their order."""
        return tuple(vars(self._statistics).values())

    @property
    def counts(self) -> bytes | None:
        """Return how many are in each bin, int64 in bytes; None where nothing was counted."""
        return None if self._bin_counts is None else self._bin_counts.tobytes()

    def add(self, array: Array) -> bool:
        """Add a contiguous array's numbers; return False, adding none, unless it is of float32 or 64."""
        if array.dtype not in (np.float32, np.float64) or not array.dtype.isnative:
            return False
        flat = array.reshape(-1)
        for start in range(0, len(flat), Tensors.cached_block):
            with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN, sums of large numbers
                self._add_block(flat[start : start + Tensors.cached_block].astype(np.float64))
        return True

    def _add_block(self, block: Array) -> None:
        """Add the statistics of a block, and its counts of bins."""
        # One sum decides for nearly all blocks; only a block with NaN, Inf or an overflowing sum is filtered.
        finite = block if np.isfinite(block.sum()) else block[np.isfinite(block)]
        self._statistics = self._statistics.merged(_block_statistics(block, finite))
        if self._bins is not None:
            counts = _count_bins(block, np.isfinite(block), self._bins)[: self._bins.total]
            self._bin_counts = counts if self._bin_counts is None else self._bin_counts + counts

    def merge(self, moments: NumpyMoments) -> None:
        """Add the statistics and counts of other moments, which have the same bins."""
        self._statistics = self._statistics.merged(moments._statistics)
        if moments._bin_counts is not None:
            earlier = self._bin_counts
            self._bin_counts = moments._bin_counts if earlier is None else earlier + moments._bin_counts


def _block_statistics(block: Array, finite: Array) -> Statistics:
    """Return the statistics of a block.  finite: its finite numbers."""
    masks = (np.isnan(block), block == np.inf, block == -np.inf, finite == 0)
    nan, inf, negative_inf, zeros = (int(np.count_nonzero(mask)) for mask in masks)
    if not len(finite):
        return Statistics(nan=nan, inf=inf, negative_inf=negative_inf)
    mean = float(finite.mean())
    # Divided first, large numbers stay in range.
    if not math.isfinite(mean):  # the sum overflows
        mean = float((finite / len(finite)).sum())
    return Statistics(
        count=len(finite), mean=mean, m2=float(np.square(finite - mean).sum()),
        absolute=float(np.abs(finite).sum()), least=float(finite.min()), most=float(finite.max()), nan=nan,
        inf=inf, negative_inf=negative_inf, zeros=zeros,
    )  # fmt: skip


MAX_VECTORS = 64
"""Vectors that wait to be merged."""
_REAL = "fiub"
"""Kinds of element types of NumPy that hold real numbers."""

# Native code computes the same numbers in one pass; without a compiler NumPy does.
Moments: Any = interceptor.Moments if interceptor.NATIVE else NumpyMoments
"""Statistics of arrays of NumPy."""


def numbers(tensor: Any) -> Any:
    """Return stored elements in one row, magnitudes if complex; None without, as on the device meta."""
    tensors = tensors_of(tensor)
    stored = tensors.stored_values(tensor)
    return None if stored is None else tensors.reshape(tensors.detach(stored), [-1])


class Accumulator:
    """Statistics, and a sketch where there are bins, of all tensors that were added.

    Memory does not grow with their number.  Adding does not wait for the device.
    """

    __slots__ = ("_bin_counts_by_device", "_bins", "_unstored_zeros", "_vectors_by_device", "host_moments")

    def __init__(self, bins: Bins | None) -> None:
        self._bins = bins
        # Numbers on the host are merged at once; those on a device wait as vectors, since to read them would
        # synchronise.
        self.host_moments = Moments() if bins is None else Moments(bins.bits)
        self._vectors_by_device: dict[str, list[Any]] = {}
        self._bin_counts_by_device: dict[str, Any] = {}
        self._unstored_zeros = 0  # of sparse tensors

    def add(self, tensor: Any) -> None:
        """Add the numbers of a tensor; none of a tensor without stored elements, as on the device meta."""
        tensors = tensors_of(tensor)
        # Memory of the host is read in place, without a copy.
        array = tensors.borrowed(tensor)
        if array is not None and array.dtype.kind in _REAL:
            self._add_array(array)
            return
        stored = tensors.stored_values(tensor)
        if stored is None:
            return
        self._unstored_zeros += tensors.unstored(tensor, stored)
        for block in tensors.blocks(stored):
            if isinstance(block, np.ndarray):
                self._add_array(block)
            elif block.shape[0]:
                self._add_block(block)

    def _add_array(self, array: Any) -> None:
        """Add real numbers of NumPy, of any layout and element type."""
        # In the order of the memory, as native code measures tensors: sums have the same last bits.
        in_memory_order = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
        # False for another type than float32 and float64, which is converted block by block.
        if self.host_moments.add(in_memory_order):
            return
        flat = array.reshape(-1)
        for start in range(0, len(flat), Tensors.cached_block):
            self.host_moments.add(flat[start : start + Tensors.cached_block].astype(np.float64))

    def _add_block(self, block: Any) -> None:
        """Add the statistics of a block, and its counts of bins, to those of its device."""
        is_finite = do("isfinite", block)
        device = str(getattr(block, "device", "cpu"))
        vectors = self._vectors_by_device.setdefault(device, [])
        vectors.append(_block_vector(block, is_finite))
        if len(vectors) >= MAX_VECTORS:
            # Merged on the device, so that neither memory grows nor the host waits.
            self._vectors_by_device[device] = [_merge_rows(do("stack", vectors))]
        if self._bins is not None:
            bin_counts = _count_bins(block, is_finite, self._bins)
            earlier = self._bin_counts_by_device.get(device)
            self._bin_counts_by_device[device] = bin_counts if earlier is None else earlier + bin_counts

    @staticmethod
    def add_all(pairs: Iterable[tuple[Accumulator, Any]]) -> None:
        """Add each tensor to its accumulator, all with equal bins; shared memory is read once; a hot path."""
        pairs = list(pairs)
        if interceptor.NATIVE:
            arrays = [x if type(x) is np.ndarray else tensors_of(x).borrowed(x) for _, x in pairs]
            moments = tuple([accumulator.host_moments for accumulator, _ in pairs])
            pairs = [pairs[i] for i in Moments.add_all(moments, tuple(arrays), (-1,) * len(pairs))]
        for accumulator, tensor in pairs:
            accumulator.add(tensor)

    def vector(self) -> Sequence[float]:
        """Return the fields of `statistics` in their order."""
        if self._vectors_by_device or self._unstored_zeros:
            return tuple(vars(self.statistics()).values())
        numbers: Sequence[float] = self.host_moments.numbers
        return numbers

    def statistics(self) -> Statistics:
        """Return the statistics of all that was added; wait for the devices."""
        # Vectors of each device are merged there first: one transfer for each device.
        total = Statistics.of_vector(self.host_moments.numbers)
        if count := self._unstored_zeros:
            # Least and most 0: else the merge would take the empty extremes, inf and -inf.
            total = total.merged(Statistics(count=count, zeros=count, least=0.0, most=0.0))
        for vectors in self._vectors_by_device.values():
            table = tensors_of(vectors[0]).to_numpy(do("stack", vectors))
            total = total.merged(Statistics.of_vector(_merge_rows(table).tolist()))
        return total

    def sketch(self) -> Sketch | None:
        """Return the sketch of all that was added; None without bins."""
        if self._bins is None:
            return None
        host_bytes = self.host_moments.counts
        host_counts = None if host_bytes is None else np.frombuffer(host_bytes, np.int64)
        if host_counts is not None and not (self._bin_counts_by_device or self._unstored_zeros):
            return Sketch(self._bins, host_counts)
        total = np.zeros(self._bins.total, np.int64)
        if host_counts is not None:
            total += host_counts
        for counts in self._bin_counts_by_device.values():
            # The last element counts numbers that are not finite, which are in no bin.
            total += tensors_of(counts).to_numpy(counts)[: self._bins.total]
        total[self._bins.side] += self._unstored_zeros  # the bin around zero
        return Sketch(self._bins, total)


def _block_vector(block: Any, is_finite: Any) -> Any:
    """Return the ten fields of `Statistics` of a block, in order, as a vector on its device."""
    # `where`, not a selection: the elements stay on their device, in an array of a known shape.
    zeros = do("zeros_like", block)
    count = _count(is_finite, block)
    finite_values = do("where", is_finite, block, zeros)
    # At least 1 in the divisor: the mean of no numbers counts for nothing in a merge.
    mean = do("sum", finite_values) / do("maximum", count, count * 0 + 1)
    distance = do("where", is_finite, block - mean, zeros)
    least = do("min", do("where", is_finite, block, zeros + float("inf")))
    most = do("max", do("where", is_finite, block, zeros - float("inf")))
    return do("stack", [
        count, mean, do("sum", distance * distance), do("sum", do("abs", finite_values)), least, most,
        # NaN alone is unequal to itself.
        _count(block != block, block), _count(block == float("inf"), block),
        _count(block == float("-inf"), block), _count(block == 0, block),
    ])  # fmt: skip


def _count(flags: Any, like: Any) -> Any:
    """Return the number of flags that are set, in the element type of `like`."""
    # In the element type of the block, so that one vector holds all numbers; a block is small enough to be
    # counted exactly in float32.
    return astype(do("count_nonzero", flags), get_dtype_name(like))


def _merge_rows(table: Any) -> Any:
    """Return one vector for several, the rows of a table, by Chan's formula for many sets of numbers."""
    if table.shape[0] == 1:
        return table[0]
    # Columns are the fields of Statistics: 3 is `absolute`, 4 and 5 the extremes, counts from 6 on.
    count, mean, m2 = table[:, 0], table[:, 1], table[:, 2]
    total = do("sum", count)
    # The mean of several sets, and the squared distances around it: sums of squares would cancel.
    centre = do("sum", count * mean) / do("maximum", total, total * 0 + 1)
    distance = mean - centre
    return do("stack", [
        total, centre, do("sum", m2 + count * distance * distance), do("sum", table[:, 3]),
        do("min", table[:, 4]), do("max", table[:, 5]), *(do("sum", table[:, i]) for i in range(6, 10)),
    ])  # fmt: skip


def _count_bins(block: Any, is_finite: Any, bins: Bins) -> Any:
    """Return the number of elements in each bin, and behind them that of the elements that are not finite."""
    tensors = tensors_of(block)
    leading_bits, bits_of_one = tensors.leading_bits(block, bins.bits)
    # Leading bits of the element type itself, relative to those of 1, number the same bins as float64 does.
    bits_below_lowest = bits_of_one + (LOWEST << bins.bits) - 1
    magnitude_bin = do("clip", leading_bits - bits_below_lowest, 0, bins.side - 1) + 1
    finite_values = do("where", is_finite, block, do("zeros_like", block))
    index = bins.side + astype(do("sign", finite_values), "int64") * astype(magnitude_bin, "int64")
    # NaN and Inf are counted behind the bins, as a mask would give tensors of a size that is not known ahead.
    index = do("where", is_finite, index, do("zeros_like", index) + bins.total)
    return tensors.counts(index, bins.total + 1)

"""Statistics of numbers, and sketches from which quantiles are computed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.tools.libraries import numpy as np
from amanda.tools.results import field_values, made_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite ones among some numbers; of complex ones their magnitudes.

    count: how many are finite.  m2: sum of the squared distances from the mean.  absolute: sum of the
    magnitudes.  least, most: inf and -inf where count is 0.  nan, inf, negative_inf: how many are not
    finite.  zeros: how many are 0.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    absolute: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    nan: int = 0
    inf: int = 0
    negative_inf: int = 0
    zeros: int = 0

    @classmethod
    def of_vector(cls, vector: Sequence[float]) -> Statistics:
        """Return the statistics of a vector of the ten fields, in their order."""
        count, mean, m2, absolute, least, most, *counts = vector
        return cls(int(count), mean, m2, absolute, least, most, *map(int, counts))

    def merged(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets together.  Source: Chan, Golub, LeVeque 1979, eq. 2.1."""
        count = self.count + other.count
        share = other.count / count if count else 0.0
        # Means and squared distances instead of sums of squares: those lose all digits where the mean is
        # large.
        distance = other.mean - self.mean
        between_m2 = distance * distance * self.count * share if self.count and other.count else 0.0
        mean = self.mean + distance * share
        # Means of opposite sign near the largest number: their difference overflows, their weighted sum does
        # not.
        if math.isinf(distance):
            mean = self.mean * (1 - share) + other.mean * share
        return Statistics(
            count, mean, m2=self.m2 + other.m2 + between_m2, absolute=self.absolute + other.absolute,
            least=min(self.least, other.least), most=max(self.most, other.most), nan=self.nan + other.nan,
            inf=self.inf + other.inf, negative_inf=self.negative_inf + other.negative_inf,
            zeros=self.zeros + other.zeros,
        )  # fmt: skip

    @property
    def elements(self) -> int:
        """All numbers, those that are not finite too."""
        return self.count + self.nan + self.inf + self.negative_inf

    @property
    def std(self) -> float:
        """Standard deviation of the population, as numpy's default is."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    @property
    def l1(self) -> float:
        """Sum of magnitudes."""
        return self.absolute

    @property
    def l2(self) -> float:
        """Root of the sum of squares."""
        # The sum of squares is that of the distances from the mean and of the mean itself.
        return math.sqrt(self.m2 + self.count * self.mean * self.mean)

    @property
    def largest(self) -> float:
        """Largest magnitude, the maximum norm."""
        return max(abs(self.least), abs(self.most)) if self.count else 0.0

    @property
    def sparsity(self) -> float:
        """Share of zeros among all numbers."""
        return self.zeros / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; None for an infinity, which JSON lacks."""
        # JSON has no infinity, which an empty set has as its extremes.
        return {name: x if math.isfinite(x) else None for name, x in field_values(self).items()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Statistics:
        """Return the statistics that `to_dict` described.

        Raises ValueError for a value of another type or a negative count, KeyError for a missing field.
        """
        # None stands for an infinity, the default of the extremes of an empty set.
        fields = {name: value[name] for name in cls.__dataclass_fields__ if value[name] is not None}
        statistics = made_of(cls, fields)
        counts = (
            statistics.count, statistics.nan, statistics.inf, statistics.negative_inf, statistics.zeros,
        )  # fmt: skip
        if min(*counts, statistics.m2) < 0:
            raise ValueError(f"its statistics are {dict(value)}")
        return statistics


LOWEST, OCTAVES = -88, 128
"""Magnitudes from 2**-88 (3e-27) up to 2**40 (1e12) have bins of their own."""


@dataclass(frozen=True)
class Bins:
    """The bins in which numbers are counted.

    bits: of the mantissa that tell bins apart, so 2**bits in each octave.  Bins are numbered from the
    most negative to the most positive; the middle one is for zeros, and those at both sides of it for
    magnitudes below 2**-88; the first and the last are for those from 2**40.
    """

    bits: int

    @classmethod
    def of(cls, count: int) -> Bins:
        """Return bins of both signs.  count: a power of two from 256 to 2**24, else AmandaError is raised."""
        # Half of the bins are for negative numbers, and each octave has 2**bits.
        bins_of_octave = count // (2 * OCTAVES)
        bits = bins_of_octave.bit_length() - 1
        if not 0 <= bits <= 16 or count != 2 * OCTAVES << bits:
            raise AmandaError(
                f"bins is {count!r}; give 0 for none or a power of two from {2 * OCTAVES} to {2**24}"
            )
        return cls(bits)

    @property
    def side(self) -> int:
        """Bins of one sign, with the two for what is too small and too large."""
        return (OCTAVES << self.bits) + 2

    @property
    def total(self) -> int:
        """Number of bins of both signs and of zero."""
        return 2 * self.side + 1

    @property
    def error(self) -> float:
        """The largest relative error of a quantile between 2**-88 and 2**40 in magnitude."""
        return 2.0 ** -(self.bits + 1)

    def edges(self, index: int) -> tuple[float, float]:
        """Return the least and the largest magnitude of a bin, with the sign of its numbers."""
        offset = index - self.side
        if offset == 0:
            return 0.0, 0.0
        sign = math.copysign(1.0, offset)
        return sign * self._lower_edge(abs(offset) - 1), sign * self._lower_edge(abs(offset))

    def _lower_edge(self, position: int) -> float:
        """Return the lower edge of the bin of a sign at a position from zero; 0 is for what is too small."""
        if position == 0:
            return 0.0
        if position == self.side:
            return math.inf
        # Bins of an octave are equally wide, so that leading bits of the mantissa tell them apart without a
        # logarithm.
        octave, step = divmod(position - 1, 1 << self.bits)
        return math.ldexp(1.0 + step / (1 << self.bits), LOWEST + octave)


class Sketch:
    """Counts of numbers by bin; empty bins are left out.

    Args:
        bins: Bins in which the numbers were counted.
        counts: Counts by the number of the bin, or an array with the count of each bin.
    """

    def __init__(self, bins: Bins, counts: dict[int, int] | NDArray[Any]) -> None:
        self.bins, self._counts = bins, counts

    @property
    def counts(self) -> dict[int, int]:
        """Counts of the bins that have numbers."""
        # When first asked for: to look through thousands of bins takes longer than to measure a small tensor,
        # and most results are read without their quantiles.
        if not isinstance(self._counts, dict):
            occupied = np.flatnonzero(self._counts)
            self._counts = dict(zip(occupied.tolist(), self._counts[occupied].tolist(), strict=True))
        return self._counts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and (self.bins, self.counts) == (other.bins, other.counts)

    @property
    def total(self) -> int:
        """Numbers in all bins."""
        return sum(self.counts.values())

    def merged(self, other: Sketch) -> Sketch:
        """Return the counts of both sketches together, in the wider bins of the two."""
        bins = min(self.bins, other.bins, key=lambda bins: bins.bits)
        counts = Counter[int]()
        for index, count in (*self._coarser(bins), *other._coarser(bins)):
            counts[index] += count
        return Sketch(bins, dict(sorted(counts.items())))

    def _coarser(self, bins: Bins) -> Iterator[tuple[int, int]]:
        """Yield the index in wider bins of each count, with the count; several may be of one wider bin."""
        dropped_bits = self.bins.bits - bins.bits
        for index, count in self.counts.items():
            offset = index - self.bins.side
            position = abs(offset)
            if 1 < position < self.bins.side:
                # Bins 0 and 1 are zero and what is too small: they have no neighbours to be joined with.
                position = ((position - 2) >> dropped_bits) + 2
            elif position == self.bins.side:
                position = bins.side
            yield bins.side + (position if offset >= 0 else -position), count

    def quantile(self, q: float, least: float, most: float) -> float | None:
        """Return the number below which a share q lies, between the two nearest as numpy's default does.

        Args:
            q: The share, from 0 to 1.
            least: The smallest number, which is known.
            most: The largest number.
        """
        total = self.total
        if not total:
            return None
        rank = q * (total - 1)
        bins = self._bin_of_rank(math.floor(rank)), self._bin_of_rank(math.ceil(rank))
        middles = (self._bin_middle(index, least, most) for index in bins)
        # The extremes are known exactly, so no quantile lies beyond them.
        low, high = (min(max(middle, least), most) for middle in middles)
        return low + (high - low) * (rank - math.floor(rank))

    def _bin_of_rank(self, rank: int) -> int:
        """Return the bin of the number at a rank, from 0; raise IndexError for a rank beyond the numbers."""
        indices = sorted(self.counts)
        return indices[bisect_right(list(accumulate(map(self.counts.__getitem__, indices))), rank)]

    def _bin_middle(self, index: int, least: float, most: float) -> float:
        """Return the middle of a bin; a known extreme for a bin without an end, 0 for those around zero."""
        near, far = self.bins.edges(index)
        if math.isinf(far):
            return most if far > 0 else least
        return 0.0 if near == 0.0 else (near + far) / 2

    def histogram(self) -> list[tuple[float, float, int]]:
        """Return lower edge, upper edge and count of each bin that has numbers, in order."""
        # Sorted: the edges of a negative bin come by magnitude, so that the upper one is first.
        return [
            (*sorted(self.bins.edges(index)), count)  # type: ignore[misc]
            for index, count in sorted(self.counts.items())
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the bits of bins, and pairs of bin and count."""
        return {"bits": self.bins.bits, "counts": [[index, count] for index, count in self.counts.items()]}

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Sketch:
        """Return the sketch that `to_dict` described."""
        pairs: Iterable[tuple[int, int]] = value["counts"]  # type: ignore[assignment]
        return cls(Bins(int(value["bits"])), {int(i): int(n) for i, n in pairs})  # type: ignore[call-overload]

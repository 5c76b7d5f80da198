"""Quantiles in constant memory: a histogram whose bins divide each power of two evenly.

Source: Masson, Rim, Lee 2019 (DDSketch, VLDB 12), with the linearly interpolated logarithm of its
implementations: a bin is found from the exponent and the first bits of the mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from amanda.errors import AmandaError

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
        """Bins of both signs: `count`, a power of two from 256 to 2**24.

        Raises AmandaError for another number.
        """
        bits = (count // (2 * OCTAVES)).bit_length() - 1
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
        """Bins of both signs, and zero's."""
        return 2 * self.side + 1

    @property
    def error(self) -> float:
        """The largest relative error of a quantile between 2**-88 and 2**40 in magnitude."""
        return 2.0 ** -(self.bits + 1)

    def edges(self, index: int) -> tuple[float, float]:
        """The least and the largest magnitude of a bin, with the sign of its numbers."""
        offset = index - self.side
        if offset == 0:
            return 0.0, 0.0
        sign = math.copysign(1.0, offset)
        return sign * self._lower(abs(offset) - 1), sign * self._lower(abs(offset))

    def _lower(self, position: int) -> float:
        """Lower edge of a bin of one sign; position 0 is for what is too small."""
        if position == 0:
            return 0.0
        if position == self.side:
            return math.inf
        octave, part = divmod(position - 1, 1 << self.bits)
        return math.ldexp(1.0 + part / (1 << self.bits), LOWEST + octave)


@dataclass
class Sketch:
    """Counts of numbers by bin; empty bins are left out."""

    bins: Bins
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Numbers in all bins."""
        return sum(self.counts.values())

    def merged(self, other: Sketch) -> Sketch:
        """Both together, in the wider bins of the two."""
        bins = min(self.bins, other.bins, key=lambda bins: bins.bits)
        counts: dict[int, int] = {}
        for sketch in (self, other):
            for index, count in sketch._coarser(bins):
                counts[index] = counts.get(index, 0) + count
        return Sketch(bins, dict(sorted(counts.items())))

    def _coarser(self, bins: Bins) -> Iterator[tuple[int, int]]:
        """Bins and counts, where 2**n neighbours of ours are one bin."""
        finer = self.bins.bits - bins.bits
        for index, count in self.counts.items():
            offset = index - self.bins.side
            position = abs(offset)
            if 1 < position < self.bins.side:
                position = ((position - 2) >> finer) + 2
            elif position == self.bins.side:
                position = bins.side
            yield bins.side + (position if offset >= 0 else -position), count

    def quantile(self, q: float, least: float, most: float) -> float | None:
        """The number below which a share q lies, between the two that are nearest as numpy's default does.

        least, most: the extremes, which are known.  None where there are no numbers.
        """
        total = self.total
        if not total:
            return None
        rank = q * (total - 1)
        below, above = self._at(math.floor(rank)), self._at(math.ceil(rank))
        low, high = (min(max(self._middle(index, least, most), least), most) for index in (below, above))
        return low + (high - low) * (rank - math.floor(rank))

    def _at(self, rank: int) -> int:
        """The bin of the number at a place in order, from 0."""
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen > rank:
                return index
        raise IndexError(rank)

    def _middle(self, index: int, least: float, most: float) -> float:
        near, far = self.bins.edges(index)
        if math.isinf(far):
            return most if far > 0 else least
        return 0.0 if near == 0.0 else (near + far) / 2

    def histogram(self) -> list[tuple[float, float, int]]:
        """Lower edge, upper edge and count of each bin that has numbers, in order."""
        return [
            (*sorted(self.bins.edges(index)), count)  # type: ignore[misc]
            for index, count in sorted(self.counts.items())
        ]

    def to_dict(self) -> dict[str, object]:
        """Bits, and pairs of bin and count."""
        return {"bits": self.bins.bits, "counts": [[index, count] for index, count in self.counts.items()]}

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Sketch:
        """Return the sketch that `to_dict` described."""
        pairs: Iterable[tuple[int, int]] = value["counts"]  # type: ignore[assignment]
        return cls(Bins(int(value["bits"])), {int(i): int(n) for i, n in pairs})  # type: ignore[call-overload]

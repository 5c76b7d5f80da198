"""Statistics of arrays of NumPy whose elements are finite: of a block, and of many small arrays together.

The ten numbers of `Statistics` are computed in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda.tools._libraries import numpy as np
from amanda.tools.kit._tensors import CACHED_BLOCK
from amanda.tools.stats._sketch import LOWEST, OCTAVES, Bins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

SMALL = 4096
"""Elements below which arrays are measured together."""
_MANTISSA = 23


class _Memory(threading.local):
    """Memory to compute in, which stays in a processor's cache; a thread's is made at its first use."""

    wide: Array
    scratch: Array
    flags: Array
    keys: Array

    def __getattr__(self, name: str) -> Array:
        self.wide, self.scratch = np.empty((2, CACHED_BLOCK))
        self.flags = np.empty(CACHED_BLOCK, bool)
        self.keys = np.empty(CACHED_BLOCK, np.intp)
        found: Array = self.__dict__[name]
        return found


_memory = _Memory()


def of_block(block: Array) -> Array | None:
    """Return the numbers of `Statistics` for up to CACHED_BLOCK elements; None if some are not finite."""
    least, most = float(block.min()), float(block.max())
    if not (np.isfinite(least) and np.isfinite(most)):
        return None
    count = block.size
    wide, scratch, flags = _memory.wide[:count], _memory.scratch[:count], _memory.flags[:count]
    np.copyto(wide, block)
    total = np.add.reduce(wide)
    mean = total / count
    np.subtract(wide, mean, out=scratch)
    squares = np.add.reduce(np.square(scratch, out=scratch))
    absolute = total if least >= 0 else -total if most <= 0 else np.add.reduce(np.abs(wide, out=scratch))
    zeros = np.count_nonzero(np.equal(block, 0, out=flags))
    return np.array([count, mean, squares, absolute, least, most, 0, 0, 0, zeros])


def of_small(rows: Sequence[Array]) -> Array:
    """Return a table of the numbers of `Statistics`: a row for each array of finite elements."""
    sizes = np.array([len(row) for row in rows])
    starts = np.cumsum(sizes) - sizes
    together = np.concatenate(rows)
    wide = together.astype(np.float64)
    mean = np.add.reduceat(wide, starts) / sizes
    distances = wide - np.repeat(mean, sizes)
    zeros = np.add.reduceat((together == 0).view(np.uint8), starts, dtype=np.int64)
    nothing = np.zeros(len(rows))
    return np.stack([
        sizes, mean, np.add.reduceat(distances * distances, starts), np.add.reduceat(np.abs(wide), starts),
        np.minimum.reduceat(together, starts), np.maximum.reduceat(together, starts),
        nothing, nothing, nothing, zeros,
    ], 1)  # fmt: skip


def are_finite(rows: Sequence[Array]) -> Array:
    """Return for each array whether all its elements are finite."""
    sizes = np.array([len(row) for row in rows])
    found: Array = np.logical_and.reduceat(np.isfinite(np.concatenate(rows)), np.cumsum(sizes) - sizes)
    return found


def indices(block: Array, bins: Bins) -> Array:
    """Return the bin of each element of a block of float64."""
    written = block.view(np.int64)
    index: Array = written & np.int64((1 << 63) - 1)
    index >>= 52 - bins.bits
    index -= ((1023 + LOWEST) << bins.bits) - 1
    np.maximum(index, 0, out=index)
    np.minimum(index, bins.side - 1, out=index)
    index += 1
    index[block == 0] = 0
    below = written >> 63  # -1 of negative numbers, with which `^` and `-` change a sign
    index ^= below
    index -= below
    index += bins.side
    return index


def counts_of(block: Array, bins: Bins) -> Array:
    """Return the number of elements of a block of float64 in each bin, and behind these a 0."""
    found: Array = np.bincount(indices(block, bins), minlength=bins.total + 1)
    return found


_SHARE = SMALL // 64
"""Least of SMALL that an array which waits takes: the arrays of tiny tensors hold more than their keys."""


class Keys:
    """Counts of numbers in float32 by their first bits: sign, exponent, and what tells bins apart.

    Numbers with one key are in one bin, but for key 0 and its negative: zeros, and numbers that are nearly 0.
    """

    def __init__(self, bins: Bins) -> None:
        self._bins = bins
        self._side = 1 << (8 + bins.bits)
        self._counts = np.zeros(0, np.int64)
        self._waiting: list[Array] = []
        self._left = SMALL

    @staticmethod
    def suit(bins: Bins) -> bool:
        """Return True if keys have 16 bits or less."""
        return bins.bits <= 7

    @staticmethod
    def of(numbers: Array, bins: Bins) -> Array:
        """Return the keys of numbers in float32."""
        return (numbers.view(np.uint32) >> (_MANTISSA - bins.bits)).astype(np.uint16)

    def are_told(self, keys: Array, zeros: int) -> bool:
        """Return True if bins follow from keys of numbers of which so many are 0."""
        return int(np.count_nonzero((keys & (self._side - 1)) == 0)) == zeros

    def told(self, block: Array, zeros: int) -> Array | None:
        """Return the keys of up to SMALL numbers, or counts of more by their keys; `zeros` of these are 0.

        None where keys do not tell bins.
        """
        if len(block) <= SMALL:
            keys = self.of(block, self._bins)
            return keys if self.are_told(keys, zeros) else None
        wide = _memory.keys[: len(block)]
        np.right_shift(block.view(np.uint32), _MANTISSA - self._bins.bits, out=wide, casting="unsafe")
        found = np.bincount(wide, minlength=2 * self._side)
        return found if found[0] + found[self._side] == zeros else None

    def add(self, told: Array) -> None:
        """Count numbers by their keys, or add counts."""
        if told.dtype != np.uint16:
            self._add_counts(told)
            return
        self._waiting.append(told)
        self._left -= max(len(told), _SHARE)
        if self._left <= 0:
            self._count()

    def _count(self) -> None:
        if self._waiting:
            self._add_counts(np.bincount(np.concatenate(self._waiting), minlength=2 * self._side))
        self._waiting, self._left = [], SMALL

    def _add_counts(self, found: Array) -> None:
        """Add counts by keys to those by bins, in which keys of one sign follow one another."""
        if not len(self._counts):
            self._counts = np.zeros(self._bins.total, np.int64)
        bins, counts, side = self._bins.side, self._counts, self._side
        first = (127 + LOWEST) << self._bins.bits
        end = first + (OCTAVES << self._bins.bits)
        starts = [0, 1, first, end]
        zero, low, _, high, zero_below, low_below, _, high_below = np.add.reduceat(
            found, [*starts, *(side + one for one in starts)]
        ).tolist()
        counts[bins + 2 : -1] += found[first:end]
        counts[bins - 2 : 0 : -1] += found[side + first : side + end]
        for i, count in ((bins, zero + zero_below), (bins + 1, low), (bins - 1, low_below),
                         (-1, high), (0, high_below)):  # fmt: skip
            if count:
                counts[i] += count

    def counts(self) -> Array | int:
        """Return how many numbers are in each bin; 0 where there are no numbers."""
        self._count()
        return self._counts if len(self._counts) else 0

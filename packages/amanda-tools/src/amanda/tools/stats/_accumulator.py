"""Statistics of a stream of tensors, kept where the tensors are."""

from __future__ import annotations

from typing import Any

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import astype, do, get_dtype_name
from amanda.tools.libraries import numpy as np
from amanda.tools.stats._sketch import LOWEST, Bins, Sketch
from amanda.tools.stats._statistics import Statistics

KEPT = 64
"""Vectors that wait to be merged."""


def numbers(tensor: Any) -> Any:
    """Return the elements of a tensor of any layout in one row, magnitudes of complex ones."""
    tensors = tensors_of(tensor)
    found = tensors.stored_values(tensor)
    return None if found is None else tensors.reshape(tensors.detach(found), [-1])


class Accumulator:
    """Statistics, and a sketch where there are bins, of all tensors that were added.

    Memory does not grow with their number.  Adding does not wait for the device.
    """

    def __init__(self, bins: Bins | None) -> None:
        self._bins = bins
        self._vectors: dict[str, list[Any]] = {}
        self._counts: dict[str, Any] = {}
        self._unstored = 0

    def add(self, tensor: Any) -> None:
        """Take the numbers of a tensor in."""
        tensors = tensors_of(tensor)
        found = tensors.stored_values(tensor)
        if found is None:
            return
        self._unstored += tensors.unstored(tensor, found)
        for block in tensors.blocks(found):
            if block.shape[0]:
                self._add_block(block)

    def _add_block(self, block: Any) -> None:
        vector, finite = _of_finite(block) if isinstance(block, np.ndarray) else None, None
        if is_finite_on_host := vector is not None:
            place = "cpu"
        else:
            finite = do("isfinite", block)
            vector = _vector(block, finite)
            place = str(getattr(block, "device", "cpu"))
        vectors = self._vectors.setdefault(place, [])
        vectors.append(vector)
        if len(vectors) >= KEPT:
            self._vectors[place] = [_folded(do("stack", vectors))]
        if self._bins is not None and is_finite_on_host:
            if place not in self._counts:
                self._counts[place] = np.zeros(self._bins.total + 1, np.int64)
            _count_finite(self._counts[place], block, self._bins)
        elif self._bins is not None:
            found = _binned(block, finite, self._bins)
            self._counts[place] = self._counts[place] + found if place in self._counts else found

    def statistics(self) -> Statistics:
        """Of all that was added; waits for the devices."""
        unstored = Statistics(count=self._unstored, zeros=self._unstored, least=0.0, most=0.0)
        total = unstored if self._unstored else Statistics()
        for vectors in self._vectors.values():
            table = tensors_of(vectors[0]).to_numpy(do("stack", vectors))
            total = total.merged(Statistics.of_vector(_folded(table).tolist()))
        return total

    def sketch(self) -> Sketch | None:
        """Of all that was added; None without bins."""
        if self._bins is None:
            return None
        total = np.zeros(self._bins.total, np.int64)
        for counts in self._counts.values():
            # Behind are those that are not finite.
            total += tensors_of(counts).to_numpy(counts)[: self._bins.total]
        total[self._bins.side] += self._unstored
        used = np.flatnonzero(total)
        return Sketch(self._bins, dict(zip(used.tolist(), total[used].tolist(), strict=True)))


def _of_finite(block: Any) -> Any:
    """The ten numbers of `Statistics`, of an array of NumPy, in few steps; None if some are not finite."""
    least, most = block.min(), block.max()
    if not (np.isfinite(least) and np.isfinite(most)):
        return None
    mean = block.sum() / block.size
    scratch = block - mean
    squares = np.square(scratch, out=scratch).sum()
    total = np.abs(block, out=scratch).sum()
    zeros = block.size - np.count_nonzero(block)
    return np.array([block.size, mean, squares, total, least, most, 0, 0, 0, zeros])


def _vector(block: Any, finite: Any) -> Any:
    """The ten numbers of `Statistics`, of one block."""
    zeros = do("zeros_like", block)
    count = _count(finite, block)
    kept = do("where", finite, block, zeros)
    mean = do("sum", kept) / do("maximum", count, count * 0 + 1)
    distance = do("where", finite, block - mean, zeros)
    least = do("min", do("where", finite, block, zeros + float("inf")))
    most = do("max", do("where", finite, block, zeros - float("inf")))
    return do("stack", [
        count, mean, do("sum", distance * distance), do("sum", do("abs", kept)), least, most,
        _count(block != block, block), _count(block == float("inf"), block),
        _count(block == float("-inf"), block), _count(block == 0, block),
    ])  # fmt: skip


def _count(flags: Any, like: Any) -> Any:
    return astype(do("count_nonzero", flags), get_dtype_name(like))


def _folded(table: Any) -> Any:
    """Return the vector of several sets of numbers together, each a row; Chan's formula for many."""
    if table.shape[0] == 1:
        return table[0]
    count, mean, m2 = table[:, 0], table[:, 1], table[:, 2]
    total = do("sum", count)
    centre = do("sum", count * mean) / do("maximum", total, total * 0 + 1)
    distance = mean - centre
    return do("stack", [
        total, centre, do("sum", m2 + count * distance * distance), do("sum", table[:, 3]),
        do("min", table[:, 4]), do("max", table[:, 5]), *(do("sum", table[:, i]) for i in range(6, 10)),
    ])  # fmt: skip


def _count_finite(counts: Any, block: Any, bins: Bins) -> None:
    """Add what `_binned` finds to counts, of an array of NumPy whose elements are finite, in few steps."""
    written = block.view(np.int64)
    index = written & np.int64((1 << 63) - 1)
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
    if block.size < bins.total // 16:
        np.add.at(counts, index, 1)
    else:
        counts += np.bincount(index, minlength=len(counts))


def _binned(block: Any, finite: Any, bins: Bins) -> Any:
    """Return the number of elements of a block in each bin, and behind these the number that is not finite.

    finite: which are.
    """
    tensors = tensors_of(block)
    leading, of_one = tensors.leading_bits(block, bins.bits)
    position = do("clip", leading - (of_one + (LOWEST << bins.bits) - 1), 0, bins.side - 1) + 1
    known = do("where", finite, block, do("zeros_like", block))
    index = bins.side + astype(do("sign", known), "int64") * astype(position, "int64")
    index = do("where", finite, index, do("zeros_like", index) + bins.total)
    return tensors.counts(index, bins.total + 1)

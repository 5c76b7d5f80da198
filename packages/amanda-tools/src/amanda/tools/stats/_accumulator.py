"""Statistics of a stream of tensors, kept where the tensors are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from amanda.tools._libraries import astype, do, get_dtype_name
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import tensors_of
from amanda.tools.kit._tensors import CACHED_BLOCK
from amanda.tools.stats._arrays import SMALL, Keys, are_finite, counts_of, of_block, of_small
from amanda.tools.stats._sketch import LOWEST, Bins, Sketch
from amanda.tools.stats._statistics import Statistics

KEPT = 64
"""Vectors that wait to be merged."""
_REAL = "fiub"
"""Kinds of element types of NumPy that hold real numbers."""


_Counted = tuple[Any, bool]
"""Counts of numbers, and True if they are by keys, else by bins."""


class _Part(NamedTuple):
    """A block of NumPy and what was measured of it; vector: None of a block that is not finite."""

    block: Any
    vector: Any
    counted: _Counted | None


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
        self._keys = Keys(bins) if bins is not None and Keys.suit(bins) else None
        self._unstored = 0

    def add(self, tensor: Any) -> None:
        """Take the numbers of a tensor in."""
        tensors = tensors_of(tensor)
        array = tensors.borrowed(tensor)
        if array is not None and array.dtype.kind in _REAL:
            self._add_array(array.reshape(-1))
            return
        found = tensors.stored_values(tensor)
        if found is None:
            return
        self._unstored += tensors.unstored(tensor, found)
        for block in tensors.blocks(found):
            if isinstance(block, np.ndarray):
                self._add_array(block)
            elif block.shape[0]:
                self._add_block(block)

    def _add_array(self, row: Any) -> None:
        """Take in a row of NumPy."""
        for part in self._parts(row):
            self._take(part)

    def _parts(self, row: Any) -> Iterator[_Part]:
        """Yield what is measured of blocks of a row of NumPy."""
        for start in range(0, len(row), CACHED_BLOCK):
            block = row[start : start + CACHED_BLOCK]
            vector = of_block(block)
            counted = None if vector is None else self._counted(block, int(vector[-1]))
            yield _Part(block, vector, counted)

    def _take(self, part: _Part) -> None:
        """Take in what was measured of a block."""
        if part.vector is None:
            self._add_block(_widened(part.block))
        else:
            self._add_vector(part.vector, "cpu")
            self._add_counted(part.counted)

    def _counted(self, block: Any, zeros: int) -> _Counted | None:
        """Count finite numbers of NumPy by their bins; None without bins."""
        if self._bins is None:
            return None
        if self._keys is not None and block.dtype == np.float32:
            told = self._keys.told(block, zeros)
            if told is not None:
                return told, True
        return counts_of(_widened(block), self._bins), False

    def _add_counted(self, counted: _Counted | None) -> None:
        if counted is None:
            return
        found, by_keys = counted
        if by_keys:
            assert self._keys is not None
            self._keys.add(found)
        else:
            self._add_counts(found, "cpu")

    def _add_block(self, block: Any) -> None:
        finite = do("isfinite", block)
        place = str(getattr(block, "device", "cpu"))
        self._add_vector(_vector(block, finite), place)
        if self._bins is not None:
            self._add_counts(_binned(block, finite, self._bins), place)

    def _add_vector(self, vector: Any, place: str) -> None:
        vectors = self._vectors.setdefault(place, [])
        vectors.append(vector)
        if len(vectors) >= KEPT:
            self._vectors[place] = [_folded(do("stack", vectors))]

    def _add_counts(self, counts: Any, place: str) -> None:
        self._counts[place] = self._counts[place] + counts if place in self._counts else counts

    @staticmethod
    def add_all(pairs: Iterable[tuple[Accumulator, Any]]) -> None:
        """Take the numbers of tensors in, each into an accumulator with the same bins; a hot path.

        Small tensors on the host are measured together, and memory that several tensors share once.
        """
        small: list[tuple[Accumulator, Any]] = []
        large: dict[Hashable, list[tuple[Accumulator, Any]]] = {}
        for accumulator, tensor in pairs:
            array = tensors_of(tensor).borrowed(tensor)
            if array is not None and array.dtype.kind in "iub" and array.size <= SMALL:
                single = array.astype(np.float32)
                array = single if np.array_equal(single, array) else array
            if array is None or array.dtype != np.float32 or not array.size:
                accumulator.add(tensor)
            elif array.size <= SMALL:
                small.append((accumulator, array.reshape(-1)))
            else:
                row = array.reshape(-1)
                memory = row.__array_interface__["data"][0], row.size
                large.setdefault(memory, []).append((accumulator, row))
        for alike in large.values():
            for part in alike[0][0]._parts(alike[0][1]):
                for accumulator, _ in alike:
                    accumulator._take(part)
        if not small:
            return
        finite = are_finite([row for _, row in small])
        for i in np.flatnonzero(~finite):
            small[i][0].add(small[i][1])
        small = [one for one, is_finite in zip(small, finite, strict=True) if is_finite]
        if small:
            Accumulator._add_small(*zip(*small, strict=True))

    @staticmethod
    def _add_small(accumulators: Sequence[Accumulator], rows: Sequence[Any]) -> None:
        table = of_small(rows)
        for accumulator, vector in zip(accumulators, table, strict=True):
            accumulator._add_vector(vector, "cpu")
        bins, keys = accumulators[0]._bins, accumulators[0]._keys
        if bins is None:
            return
        if keys is not None:
            every = Keys.of(np.concatenate(rows), bins)
            if keys.are_told(every, int(table[:, -1].sum())):
                ends = np.cumsum(table[:, 0].astype(int)).tolist()
                for accumulator, start, end in zip(accumulators, [0, *ends], ends, strict=False):
                    assert accumulator._keys is not None
                    accumulator._keys.add(every[start:end].copy())  # a view would keep those of all
                return
        for accumulator, row, vector in zip(accumulators, rows, table, strict=True):
            accumulator._add_counted(accumulator._counted(row, int(vector[-1])))

    def statistics(self) -> Statistics:
        """Of all that was added; waits for the devices."""
        unstored = Statistics(count=self._unstored, zeros=self._unstored, least=0.0, most=0.0)
        total = unstored if self._unstored else Statistics()
        for vectors in self._vectors.values():
            if len(vectors) == 1 and isinstance(vectors[0], np.ndarray):  # a hot path of summaries
                found = Statistics.of_vector(vectors[0].tolist())
                total = total.merged(found) if total.elements else found
                continue
            call = _on_numpy if isinstance(vectors[0], np.ndarray) else do
            table = tensors_of(vectors[0]).to_numpy(call("stack", vectors))
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
        if self._keys is not None:
            total += self._keys.counts()
        total[self._bins.side] += self._unstored
        used = np.flatnonzero(total)
        return Sketch(self._bins, dict(zip(used.tolist(), total[used].tolist(), strict=True)))


def _widened(block: Any) -> Any:
    """Return numbers of NumPy as float64, without its warning of a signalling NaN."""
    with np.errstate(invalid="ignore"):
        return block.astype(np.float64)


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
    call = _on_numpy if isinstance(table, np.ndarray) else do
    count, mean, m2 = table[:, 0], table[:, 1], table[:, 2]
    total = call("sum", count)
    centre = call("sum", count * mean) / call("maximum", total, total * 0 + 1)
    distance = mean - centre
    return call("stack", [
        total, centre, call("sum", m2 + count * distance * distance), call("sum", table[:, 3]),
        call("min", table[:, 4]), call("max", table[:, 5]), *(call("sum", table[:, i]) for i in range(6, 10)),
    ])  # fmt: skip


def _on_numpy(name: str, *args: Any) -> Any:
    """Call a function of NumPy, without autoray's question of whose arrays these are."""
    return getattr(np, name)(*args)


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

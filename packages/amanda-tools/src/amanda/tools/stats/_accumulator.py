"""Statistics of a stream of tensors, kept where the tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
from autoray import astype, do, get_dtype_name

from amanda.tools.mapping import backend_of
from amanda.tools.stats import _numpy, _pytorch, _tensorflow
from amanda.tools.stats._sketch import LOWEST, Bins, Sketch
from amanda.tools.stats._statistics import Statistics

KEPT = 64
"""Vectors that wait to be merged."""


class Framework(Protocol):
    """Operations that each framework has in its own way."""

    def numbers(self, tensor: Any) -> tuple[Any, int]: ...
    def blocks(self, row: Any) -> Iterator[Any]: ...
    def leading_bits(self, block: Any, bits: int) -> tuple[Any, int]: ...
    def counts(self, indices: Any, total: int) -> Any: ...
    def place(self, tensor: Any) -> str | None: ...
    def arrays(self, tensors: list[Any]) -> list[Any]: ...


def framework_of(tensor: Any) -> Framework:
    """The module for a tensor; numpy's for what it can turn into arrays."""
    return cast(Framework, _FRAMEWORKS.get(backend_of(tensor), _numpy))


_FRAMEWORKS = {"torch": _pytorch, "tensorflow": _tensorflow}


def numbers(tensor: Any) -> Any:
    """Return the elements of a tensor of any layout in one row, magnitudes of complex ones."""
    framework = framework_of(tensor)
    return None if framework.place(tensor) is None else framework.numbers(tensor)[0]


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
        framework = framework_of(tensor)
        place = framework.place(tensor)
        if place is None:
            return
        row, unstored = framework.numbers(tensor)
        self._unstored += unstored
        for block in framework.blocks(row):
            if block.shape[0]:
                self._add_block(place, block)

    def _add_block(self, place: str, block: Any) -> None:
        vector, finite = _numpy.finite_vector(block) if isinstance(block, np.ndarray) else None, None
        if vector is None:
            finite = do("isfinite", block)
            vector = _vector(block, finite)
        vectors = self._vectors.setdefault(place, [])
        vectors.append(vector)
        if len(vectors) >= KEPT:
            self._vectors[place] = [_folded(vectors)]
        if self._bins is not None:
            found = _binned(block, finite, self._bins)
            self._counts[place] = self._counts[place] + found if place in self._counts else found

    def statistics(self) -> Statistics:
        """Of all that was added; waits for the devices."""
        unstored = Statistics(count=self._unstored, zeros=self._unstored, least=0.0, most=0.0)
        total = unstored if self._unstored else Statistics()
        for vectors in self._vectors.values():
            arrays = framework_of(vectors[0]).arrays(vectors)
            total = total.merged(Statistics.of_vector(_folded(arrays).tolist()))
        return total

    def sketch(self) -> Sketch | None:
        """Of all that was added; None without bins."""
        if self._bins is None:
            return None
        total = np.zeros(self._bins.total, np.int64)
        for counts in self._counts.values():
            (array,) = framework_of(counts).arrays([counts])
            total += array[: self._bins.total]  # behind are those that are not finite
        total[self._bins.side] += self._unstored
        used = np.flatnonzero(total)
        return Sketch(self._bins, dict(zip(used.tolist(), total[used].tolist(), strict=True)))


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


def _folded(vectors: list[Any]) -> Any:
    """The vector of several sets of numbers together; Chan's formula for many."""
    if len(vectors) == 1:
        return vectors[0]
    table = do("stack", vectors)
    count, mean, m2 = table[:, 0], table[:, 1], table[:, 2]
    total = do("sum", count)
    centre = do("sum", count * mean) / do("maximum", total, total * 0 + 1)
    distance = mean - centre
    return do("stack", [
        total, centre, do("sum", m2 + count * distance * distance), do("sum", table[:, 3]),
        do("min", table[:, 4]), do("max", table[:, 5]), *(do("sum", table[:, i]) for i in range(6, 10)),
    ])  # fmt: skip


def _binned(block: Any, finite: Any, bins: Bins) -> Any:
    """Return the number of elements of a block in each bin, and behind these the number that is not finite.

    finite: which are; None if all of them.
    """
    framework = framework_of(block)
    leading, of_one = framework.leading_bits(block, bins.bits)
    position = do("clip", leading - (of_one + (LOWEST << bins.bits) - 1), 0, bins.side - 1) + 1
    known = block if finite is None else do("where", finite, block, do("zeros_like", block))
    index = bins.side + astype(do("sign", known), "int64") * astype(position, "int64")
    if finite is not None:
        index = do("where", finite, index, do("zeros_like", index) + bins.total)
    return framework.counts(index, bins.total + 1)

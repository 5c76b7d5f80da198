"""How well ops of two runs fit each other: by module, type, shapes and values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from amanda.tools.diff._compare import summary_distance
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAR = 0.05
"""Relative error of statistics and samples up to which values are taken for those of the same op."""
_CELLS = 1 << 20
"""Pairs among which the best are looked for at once."""
_LATE = 1e-4
"""Of ops that fit as well, such as a product and its reshaped self, the first are paired."""
Key = tuple[str, str]
"""Module and type of an op."""
Side = tuple[Run, Sequence[int], Sequence[Key]]
"""A run, its ops of one phase, and their keys."""


class Likeness:
    """Ops of two runs, each by its position among those of a phase."""

    def __init__(self, one: Side, other: Side) -> None:
        self._first = [[_first(run, index) for index in indices] for run, indices, _ in (one, other)]
        self._keys = one[2], other[2]
        self._shapes = [[_shapes(run, index) for index in indices] for run, indices, _ in (one, other)]
        self._sources = [[run.ops[index].source for index in indices] for run, indices, _ in (one, other)]
        self._codes = [_statistics(entries) for entries in self._first]
        self._telling = [np.array([is_telling(one[0]) for one in first], bool) for first in self._first]

    def near(self, i: int, j: int) -> bool:
        """Return True if what two ops gave at their first execution is about the same."""
        one, other = self._first[0][i], self._first[1][j]
        return len(one) == len(other) and all(map(_near, one, other))

    def best(self, ones: range, others: range) -> list[tuple[int, int]]:
        """Pair ops in order so that the pairs fit best altogether; none where there are too many to try."""
        if not len(ones) * len(others) or len(ones) * len(others) > _CELLS:
            return []
        fits = self._fits(ones, others)
        total = np.zeros((len(ones) + 1, len(others) + 1))
        for i in range(len(ones) - 1, -1, -1):
            paired = np.where(fits[i] > 0, fits[i] + total[i + 1, 1:], 0.0)
            total[i, :-1] = np.maximum(paired, total[i + 1, :-1])
            total[i] = np.maximum.accumulate(total[i, ::-1])[::-1]
        found, i, j = [], 0, 0
        while i < len(ones) and j < len(others):
            if fits[i, j] > 0 and total[i, j] == fits[i, j] + total[i + 1, j + 1]:
                found.append((ones[i], others[j]))
                i, j = i + 1, j + 1
            elif total[i, j] == total[i + 1, j]:
                i += 1
            else:
                j += 1
        return found

    def _fits(self, ones: range, others: range) -> NDArray[np.float64]:
        """Return a number for each pair of ops, 0 for two that do not fit."""
        rows, columns = slice(ones.start, ones.stop), slice(others.start, others.stop)
        key = _equal(self._keys[0][rows], self._keys[1][columns])
        module = _equal([one[0] for one in self._keys[0][rows]], [one[0] for one in self._keys[1][columns]])
        kind = _equal([one[1] for one in self._keys[0][rows]], [one[1] for one in self._keys[1][columns]])
        shape = _equal(self._shapes[0][rows], self._shapes[1][columns])
        source = _equal(self._sources[0][rows], self._sources[1][columns])
        homed = np.array([one[0] != "" for one in self._keys[0][rows]])[:, None]
        fits = (
            1.5 * (key & (homed | shape))
            + 1.0 * (shape & module & (kind | source))
            + 1.0 * (source & kind)
            + 0.5 * (shape & kind)
        )
        one, other = self._codes[0][rows, None], self._codes[1][None, columns]
        scale = np.maximum(np.abs(one[..., 1]), np.abs(other[..., 1]))
        alike = (one[..., 0] == other[..., 0]) & (np.abs(one[..., 1] - other[..., 1]) <= NEAR * scale)
        alike &= self._telling[0][rows, None] & self._telling[1][None, columns]
        for i, j in zip(*np.nonzero(alike), strict=True):
            if self.near(ones[i], others[j]):
                fits[i, j] += 3.0 + (shape[i, j] & module[i, j])
        late = np.add.outer(np.linspace(0, _LATE, len(ones)), np.linspace(0, _LATE, len(others)))
        return np.where(fits > 0, fits - late, 0.0)


def _first(run: Run, index: int) -> list[Entry]:
    made = run.results(index)
    return made[min(made)]


def is_telling(entry: Entry) -> bool:
    """Return False for scalars and constants: equal ones may come from any two ops."""
    found = entry.summary.statistics
    return found.elements > 1 and (found.least < found.most or bool(found.nan or found.inf))


def _near(one: Entry, other: Entry) -> bool:
    sizes = {entry.summary.statistics.elements for entry in (one, other)}
    return len(sizes) == 1 and summary_distance(one, other).relative <= NEAR


def _shapes(run: Run, index: int) -> tuple[Hashable, ...]:
    return tuple(sorted((e.position, e.shape) for one in run.results(index).values() for e in one))


def _statistics(made: Sequence[Sequence[Entry]]) -> NDArray[np.float64]:
    """Return the number of elements and the L2 norm of the first tensor that each op gave."""
    told = [one[0].summary.statistics for one in made]
    return np.array([(one.elements, one.l2) for one in told], np.float64).reshape(-1, 2)


def _equal(ones: Sequence[Hashable], others: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Return for each pair of values whether they are equal."""
    codes: dict[Hashable, int] = {}
    one, other = ([codes.setdefault(value, len(codes)) for value in values] for values in (ones, others))
    equal: NDArray[np.bool_] = np.array(one)[:, None] == np.array(other)[None, :]
    return equal

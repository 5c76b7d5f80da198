"""The values at one side of a graph's node while routines are inserted there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


class Side:
    """The inputs or outputs of a node, in order, with the names under which the graph reads them.

    A value may be a list of tensors; flat positions count each tensor of a list.

    refs: name of each flat value for its readers.  before: the names before routines replaced values.
    symbols: each flat value as an analysis sees it.  sizes: for each value the length of a list; None for a
    single tensor.  unread: flat positions of values that routines do not receive.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        symbols: Sequence[Any],
        sizes: Sequence[int | None],
        unread: Collection[int] = (),
    ) -> None:
        self.refs = list(refs)
        self.before = list(refs)
        self.symbols = list(symbols)
        self.sizes = list(sizes)
        self.unread = frozenset(unread)
        self._firsts: list[int] = []
        first = 0
        for size in self.sizes:
            self._firsts.append(first)
            first += 1 if size is None else size

    @property
    def count(self) -> int:
        """Return the number of values."""
        return len(self.sizes)

    @property
    def values(self) -> list[Any]:
        """Return the symbols for an analysis, with a list for a value that is a list."""
        return [
            self.symbols[first] if size is None else self.symbols[first : first + size]
            for first, size in zip(self._firsts, self.sizes, strict=True)
        ]

    def selected(self, selections: Sequence[Sequence[int] | None]) -> list[int]:
        """Return the positions of values that routines with these selections receive; None selects all."""
        count = self.count
        positions = set(range(count)) if None in selections else set()
        positions |= {
            position % count
            for select in selections
            for position in select or ()
            if -count <= position < count
        }
        return sorted(position for position in positions if self.unread.isdisjoint(self._range(position)))

    def flat(self, positions: Sequence[int]) -> list[int]:
        """Return the flat positions of values."""
        return [i for position in positions for i in self._range(position)]

    def where(self, positions: Sequence[int], holds: Callable[[Any], bool]) -> list[int]:
        """Return the positions among `positions` where a condition holds for each symbol."""
        return [
            position for position in positions if all(holds(self.symbols[i]) for i in self._range(position))
        ]

    def changed(self) -> list[int]:
        """Return the flat positions of replaced values."""
        return [i for i, (old, new) in enumerate(zip(self.before, self.refs, strict=True)) if old != new]

    def read(self, current: Mapping[Any, Any]) -> None:
        """Take over the names under which other nodes read the values now."""
        self.refs = [current.get(ref, ref) for ref in self.refs]
        self.before = list(self.refs)

    def _range(self, position: int) -> range:
        size, first = self.sizes[position], self._firsts[position]
        return range(first, first + (1 if size is None else size))

"""The values at one side of a graph's node while routines are put there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


class Side:
    """Inputs or outputs of a node, in order: what each is called in the graph, and where it is read now.

    A value may be a list of tensors; flat positions count each tensor of a list.

    refs: where each flat value is read now, in the graph's terms.  before: where it was read at first.
    symbols: each flat value as an analysis sees it.  sizes: for each value the length of a list; None for a
    single tensor.  unread: flat positions of values that routines are not given.
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
        """Return how many values there are."""
        return len(self.sizes)

    @property
    def values(self) -> list[Any]:
        """Return the symbols as an analysis is given them: those of a list as a list."""
        return [
            self.symbols[first] if size is None else self.symbols[first : first + size]
            for first, size in zip(self._firsts, self.sizes, strict=True)
        ]

    def selected(self, selections: Sequence[Sequence[int] | None]) -> list[int]:
        """Return the positions of values that routines with these selections get; None selects all."""
        count = self.count
        chosen = set(range(count)) if None in selections else set()
        chosen |= {
            position % count
            for select in selections
            for position in select or ()
            if -count <= position < count
        }
        return sorted(one for one in chosen if self.unread.isdisjoint(self._range(one)))

    def flat(self, positions: Sequence[int]) -> list[int]:
        """Return the flat positions of values."""
        return [i for position in positions for i in self._range(position)]

    def where(self, positions: Sequence[int], holds: Callable[[Any], bool]) -> list[int]:
        """Return those of some positions at which a condition holds for each symbol."""
        return [one for one in positions if all(holds(self.symbols[i]) for i in self._range(one))]

    def changed(self) -> list[int]:
        """Return the flat positions that are read elsewhere than at first."""
        return [i for i, (old, new) in enumerate(zip(self.before, self.refs, strict=True)) if old != new]

    def read(self, current: Mapping[Any, Any]) -> None:
        """Read each value where others read it now."""
        self.refs = [current.get(one, one) for one in self.refs]
        self.before = list(self.refs)

    def _range(self, position: int) -> range:
        size, first = self.sizes[position], self._firsts[position]
        return range(first, first + (1 if size is None else size))

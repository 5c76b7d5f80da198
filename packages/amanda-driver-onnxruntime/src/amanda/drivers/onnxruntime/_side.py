"""The values at one side of a node while routines are put there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._symbols import Symbol


class Side:
    """Inputs or outputs of a node, in the order of its schema: where each is read at the moment.

    refs: the name of each flat value; "" where an optional one is left out.  symbols: theirs, None likewise.
    sizes: for each value its length where it is a list; None for a single one.
    """

    def __init__(
        self, refs: Sequence[str], symbols: Sequence[Symbol | None], sizes: Sequence[int | None]
    ) -> None:
        self.refs = list(refs)
        self.before = list(refs)
        self.symbols = list(symbols)
        self.sizes = list(sizes)
        self._firsts: list[int] = []
        first = 0
        for size in self.sizes:
            self._firsts.append(first)
            first += 1 if size is None else size

    @property
    def values(self) -> list[Any]:
        """The symbols as an analysis is given them."""
        return [
            self.symbols[first] if size is None else self.symbols[first : first + size]
            for first, size in zip(self._firsts, self.sizes, strict=True)
        ]

    def selected(self, selections: Sequence[Sequence[int] | None]) -> list[int]:
        """The positions of the values that routines with these selections need, and that are there."""
        count = len(self.sizes)
        if any(select is None for select in selections):
            chosen = set(range(count))
        else:
            chosen = {position % count for select in selections for position in select or ()
                      if -count <= position < count}  # fmt: skip
        return sorted(one for one in chosen if all(self.refs[i] for i in self._range(one)))

    def flat(self, positions: Sequence[int]) -> list[int]:
        """The flat positions of values."""
        return [i for position in positions for i in self._range(position)]

    def changeable(self, positions: Sequence[int]) -> list[int]:
        """Those values which a routine may give anew: tensors, sequences of them and optional ones."""
        return [
            position
            for position in positions
            if all(symbol is not None and symbol.holds_tensors for symbol in self._symbols(position))
        ]

    def changed(self) -> list[int]:
        """Flat positions that are read elsewhere than at first."""
        return [i for i, (old, new) in enumerate(zip(self.before, self.refs, strict=True)) if old != new]

    def read(self, current: Mapping[str, str]) -> None:
        """Read every value where it is now."""
        self.refs = [current.get(name, name) for name in self.refs]
        self.before = list(self.refs)

    def _symbols(self, position: int) -> list[Symbol | None]:
        return [self.symbols[i] for i in self._range(position)]

    def _range(self, position: int) -> range:
        size, first = self.sizes[position], self._firsts[position]
        return range(first, first + (1 if size is None else size))

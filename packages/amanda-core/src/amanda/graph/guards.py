"""Copies of graphs that are used while what their traceable routines have read holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from amanda.graph.reads import Reads
    from amanda.plan.action import Action

CopyT = TypeVar("CopyT")

_VALUES = 8
"""Number of distinct values after which a guard stops making copies, and of copies that are kept."""
_COPIES = 32
"""Number of copies after which guards stop on all that has changed: few values each, in many combinations."""


class History:
    """Values that traceable routines have read for the graphs of some code, made again where these change.

    reads: the driver's kind.  limit: what has had that many values is restless; graphs are not made again
    for it.
    """

    def __init__(self, reads: type[Reads], limit: int = _VALUES) -> None:
        self.limit = limit
        self.reads = reads
        self._values: dict[tuple[int, Any], list[Any]] = {}
        self._holders: dict[int, Any] = {}  # which keep their ids

    def take(self, reads: Reads) -> None:
        """Note what the routines of a graph have read."""
        for place in reads:
            self._holders[id(place.holder)] = place.holder
            values = self._values.setdefault(place.key, [])
            if len(values) < self.limit and not any(reads.is_same(place.value, one) for one in values):
                values.append(place.value)

    def restless(self, action: Action) -> str:
        """Return the name of a restless value that an action reads; "" where there is none."""
        often = {key for key, values in self._values.items() if len(values) >= self.limit}
        if not often:
            return ""
        reads = self.reads()
        reads.follow(action)
        return next((reads.name_of(place) for place in reads if place.key in often), "")


class GuardedCopies(Generic[CopyT]):
    """Copies of one graph: one for each set of values that its traceable routines have read.

    history: of these values.
    """

    def __init__(self, reads: type[Reads]) -> None:
        self.history = History(reads)
        self._made = 0
        self._all: tuple[tuple[Reads, CopyT], ...] = ()
        self._last: tuple[tuple[Reads, CopyT], ...] = ()

    def find(self) -> CopyT | None:
        """Return the copy whose routines have read what is there now; None where there is none yet."""
        for one in (*self._last, *self._all):
            if one[0].hold():
                self._last = (one,)
                return one[1]
        return None

    def add(self, copy: CopyT, reads: Reads) -> None:
        """Keep a copy with what its routines have read, and the last few; called under the driver's lock."""
        self.history.take(reads)
        self._all = ((reads, copy), *self._all)[:_VALUES]
        self._made += 1
        if self._made == _COPIES:
            self.history.limit = 2

"""Copies of graphs, each valid while the values that its traceable routines have read are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from amanda.graph.reads import Reads
    from amanda.plan.action import Action

CopyT = TypeVar("CopyT")

_VALUES = 8
"""Number of distinct values after which a guard stops building copies, and number of cached copies."""
_COPIES = 32
"""Number of copies after which every changed value is volatile: few values, but many combinations."""


class History:
    """Values that traceable routines have read for the graphs of some code, which are rebuilt on changes.

    reads: the driver's class.  limit: number of distinct values after which a place is volatile; graphs are
    not rebuilt for a volatile place.
    """

    def __init__(self, reads: type[Reads], limit: int = _VALUES) -> None:
        self.limit = limit
        self.reads = reads
        self._values: dict[tuple[int, Any], list[Any]] = {}
        self._holders: dict[int, Any] = {}  # keeps their ids from being reused

    def take(self, reads: Reads) -> None:
        """Record the values that the routines of a graph have read."""
        for place in reads:
            self._holders[id(place.holder)] = place.holder
            values = self._values.setdefault(place.key, [])
            if len(values) < self.limit and not any(
                reads.is_same(place.value, earlier) for earlier in values
            ):
                values.append(place.value)

    def volatile_name(self, action: Action) -> str:
        """Return the name of a volatile value that an action reads; "" where there is none."""
        volatile = {key for key, values in self._values.items() if len(values) >= self.limit}
        if not volatile:
            return ""
        reads = self.reads()
        reads.follow(action)
        return next((reads.name_of(place) for place in reads if place.key in volatile), "")


class GuardedCopies(Generic[CopyT]):
    """Copies of one graph: one for each set of values that its traceable routines have read.

    history: the values of all copies.
    """

    def __init__(self, reads: type[Reads]) -> None:
        self.history = History(reads)
        self._copies_made = 0
        self._entries: tuple[tuple[Reads, CopyT], ...] = ()
        self._last_entry: tuple[tuple[Reads, CopyT], ...] = ()

    def find(self) -> CopyT | None:
        """Return the copy for the present values; None where there is none yet."""
        # The last copy is tried first: values rarely change from call to call.
        for entry in (*self._last_entry, *self._entries):
            if entry[0].hold():
                self._last_entry = (entry,)
                return entry[1]
        return None

    def add(self, copy: CopyT, reads: Reads) -> None:
        """Store a copy with the values that its routines have read; called under the driver's lock."""
        self.history.take(reads)
        self._entries = ((reads, copy), *self._entries)[:_VALUES]
        self._copies_made += 1
        if self._copies_made == _COPIES:
            self.history.limit = 2

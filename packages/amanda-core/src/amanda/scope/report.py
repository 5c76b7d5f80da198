"""Report of the ops that a scope could not instrument, or ran differently from the program, with reasons."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet

logger = logging.getLogger("amanda")

MAX_PER_GROUP = 1000
"""Number of entries of one kind and reason that a report stores."""
MAX_ENTRIES = 10_000
"""Number of entries of all kinds that a report stores."""
_NAMED = 3
_COLUMN = 48


class Uninstrumented(NamedTuple):
    """An op or another part of the program that tools did not see, or that ran differently.

    what: the part.  reason: why.  where: the line of the program, "" if unknown.
    """

    what: str
    reason: str
    where: str


class Report(list[Uninstrumented]):
    """List of the parts of a program that a scope could not instrument, or ran differently, each once.

    `str` has a line for the entries of one kind and reason, with their number.  A report stores 1,000 entries
    of a kind and 10,000 in all, and says where there were more.
    """

    def __init__(self, entries: Iterable[Uninstrumented] = ()) -> None:
        super().__init__(entries)
        self._recount()

    @property
    def op_by_op(self) -> list[Uninstrumented]:
        """Compiled callables, and graphs of theirs, that ran as eager code: entries whose reason says so."""
        return [entry for entry in self if "op by op" in entry.reason]

    def _recount(self) -> None:
        self._distinct = set(self)
        self._reported_sources: WeakSet[Any] = WeakSet()
        self._counts: dict[tuple[str, str], int] = {}
        self._truncated_groups: set[tuple[str, str]] = set()
        for entry in self:
            key = _group_key(entry)
            self._counts[key] = self._counts.get(key, 0) + 1

    def add(self, subject: str, reason: str, where: str = "", *, is_logged: bool = True) -> None:
        """Add an entry, and log a warning for the first entry of its kind; constant in time.

        is_logged: False where an earlier scope has logged the same entry.
        """
        entry = Uninstrumented(subject, reason, where)
        if entry in self._distinct:
            return
        key = _group_key(entry)
        count = self._counts.get(key, 0)
        if count >= MAX_PER_GROUP or len(self._distinct) >= MAX_ENTRIES:
            if count or len(self._truncated_groups) < MAX_ENTRIES:
                self._truncated_groups.add(key)
            return
        self._distinct.add(entry)
        self._counts[key] = count + 1
        self.append(entry)
        level = logging.WARNING if is_logged and not count else logging.DEBUG
        logger.log(level, "%s: %s%s", subject, reason, f" ({where})" if where else "")

    def add_all(self, source: object, entries: Collection[tuple[str, ...]]) -> None:
        """Add the entries of a source, unless it has been added; a source has the same entries each time."""
        if source not in self._reported_sources:
            self._reported_sources.add(source)
            for entry in entries:
                self.add(*entry)

    def clear(self) -> None:
        """Remove all entries, so that the same parts are reported again."""
        super().clear()
        self._recount()

    def __reduce__(self) -> Any:
        return Report, (list(self),)

    def __str__(self) -> str:
        if not self:
            return "everything that ran was instrumented"
        groups: dict[tuple[str, str], list[Uninstrumented]] = {}
        for entry in self:
            groups.setdefault(_group_key(entry), []).append(entry)
        lines = [
            (_label(entries, key in self._truncated_groups), entries[0]) for key, entries in groups.items()
        ]
        width = min(_COLUMN, max(len(names) for names, _ in lines))
        rows = [
            f"{names:<{width}}  {first.reason}{f'  [{first.where}]' if first.where else ''}"
            for names, first in lines
        ]
        return "\n".join([*rows, *(["and others"] if self._truncated_groups - groups.keys() else [])])


def _kind_and_name(subject: str) -> tuple[str, str]:
    """Split into kind and name: "the state of", "noise" of "the state of noise"; "function", "f"."""
    kind, of, name = subject.partition(" of ")
    if not of:
        kind, _, name = subject.rpartition(" ")
    return f"{kind}{of}".strip(), name


def _group_key(entry: Uninstrumented) -> tuple[str, str]:
    return _kind_and_name(entry.what)[0], entry.reason


def _label(entries: Collection[Uninstrumented], is_cut: bool) -> str:
    """Return a label for entries of one kind, with the first few names."""
    kind, _ = _kind_and_name(next(iter(entries)).what)
    listed = ", ".join(_kind_and_name(entry.what)[1] for entry in islice(entries, _NAMED))
    more = len(entries) - _NAMED
    suffix = f" and more than {more} others" if is_cut else f" and {more} more" if more > 0 else ""
    return f"{kind} {listed}{suffix}".strip()

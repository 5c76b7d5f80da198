"""Report of what a scope could not instrument, or ran otherwise than the program would, and why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet

logger = logging.getLogger("amanda")

OF_A_KIND = 1000
"""Things of one kind and reason that a report keeps."""
IN_ALL = 10_000
"""Things of all kinds that a report keeps."""
_NAMED = 3
_COLUMN = 48


class Uninstrumented(NamedTuple):
    """One thing that tools did not see, or that ran otherwise than the program would have run it."""

    what: str
    reason: str
    where: str


class Report(list[Uninstrumented]):
    """List of what a scope could not instrument, or ran otherwise; each thing once.

    Items are single things; `str` has a line for those of one kind and reason, with their number.  A report
    keeps 1,000 things of a kind and 10,000 in all, and says where there were more.
    """

    def __init__(self, entries: Iterable[Uninstrumented] = ()) -> None:
        super().__init__(entries)
        self._reset()

    @property
    def op_by_op(self) -> list[Uninstrumented]:
        """Compiled callables, and graphs of theirs, that ran as eager code: entries whose reason says so."""
        return [entry for entry in self if "op by op" in entry.reason]

    def _reset(self) -> None:
        self._known = set(self)
        self._heard: WeakSet[Any] = WeakSet()
        self._counts: dict[tuple[str, str], int] = {}
        self._cut: set[tuple[str, str]] = set()
        for entry in self:
            key = _group(entry)
            self._counts[key] = self._counts.get(key, 0) + 1

    def add(self, what: str, reason: str, where: str = "", *, is_logged: bool = True) -> None:
        """Note something, and log it as a warning if it is the first of its kind; constant in time.

        is_logged: False where a scope before has logged the same.
        """
        entry = Uninstrumented(what, reason, where)
        if entry in self._known:
            return
        key = _group(entry)
        count = self._counts.get(key, 0)
        if count >= OF_A_KIND or len(self._known) >= IN_ALL:
            if count or len(self._cut) < IN_ALL:
                self._cut.add(key)
            return
        self._known.add(entry)
        self._counts[key] = count + 1
        self.append(entry)
        level = logging.WARNING if is_logged and not count else logging.DEBUG
        logger.log(level, "%s: %s%s", what, reason, f" ({where})" if where else "")

    def add_all(self, source: object, entries: Collection[tuple[str, ...]]) -> None:
        """Note what a source says, unless it has been heard; it says the same each time."""
        if source not in self._heard:
            self._heard.add(source)
            for entry in entries:
                self.add(*entry)

    def clear(self) -> None:
        """Forget everything, so that what comes up again is noted again."""
        super().clear()
        self._reset()

    def __reduce__(self) -> Any:
        return Report, (list(self),)

    def __str__(self) -> str:
        if not self:
            return "everything that ran was instrumented"
        groups: dict[tuple[str, str], list[Uninstrumented]] = {}
        for entry in self:
            groups.setdefault(_group(entry), []).append(entry)
        lines = [(_names(entries, key in self._cut), entries[0]) for key, entries in groups.items()]
        width = min(_COLUMN, max(len(names) for names, _ in lines))
        told = [
            f"{names:<{width}}  {first.reason}{f'  [{first.where}]' if first.where else ''}"
            for names, first in lines
        ]
        return "\n".join([*told, *(["and others"] if self._cut - groups.keys() else [])])


def _parts(what: str) -> tuple[str, str]:
    """Split into kind and name: "the state of", "noise" of "the state of noise"; "function", "f"."""
    kind, of, name = what.partition(" of ")
    if not of:
        kind, _, name = what.rpartition(" ")
    return f"{kind}{of}".strip(), name


def _group(entry: Uninstrumented) -> tuple[str, str]:
    return _parts(entry.what)[0], entry.reason


def _names(entries: Collection[Uninstrumented], is_cut: bool) -> str:
    """Return a label for things of one kind, the first few by name."""
    kind, _ = _parts(next(iter(entries)).what)
    listed = ", ".join(_parts(entry.what)[1] for entry in islice(entries, _NAMED))
    more = len(entries) - _NAMED
    rest = f" and more than {more} others" if is_cut else f" and {more} more" if more > 0 else ""
    return f"{kind} {listed}{rest}".strip()

"""Objects that installed distributions register for a framework, such as the rules of a further driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from amanda import OpContext
from amanda.errors import AmandaError
from amanda.tools.mapping._rules import RuleError

T = TypeVar("T")


class InstalledEntries:
    """The entry points of one group, each of which serves the framework or library of its name.

    what: the object of an entry, for messages.  error: raised for an entry that cannot be used.
    """

    def __init__(self, group: str, what: str, error: type[AmandaError]) -> None:
        self._group, self._what, self._error = group, what, error

    def names(self) -> list[str]:
        """Return the names that entries have."""
        return sorted(_entries_of(self._group))

    def load(self, name: str) -> Any:
        """Return the object of the entry of a name; None without one.

        Raises `error`, which names the distribution to upgrade or uninstall, where there are several entries
        or the one cannot be imported.
        """
        entries = _entries_of(self._group).get(name)
        if entries is None:
            return None
        entry, *others = entries
        if others:
            rivals = " and ".join(map(self._described, entries))
            raise self._error(f"{rivals} both serve {name}; uninstall one of them")
        try:
            return entry.load()
        except Exception as reason:
            raise self._error(
                f"{self._described(entry)} cannot be imported: {reason!r}; upgrade or uninstall that "
                "distribution"
            ) from reason

    def create(self, name: str, base: type[T], path: str) -> T | None:
        """Return an instance of the class that the entry of a name registers; None without an entry.

        path: where users import `base` from.  Raises `error` as `load` does, and for no subclass of `base`.
        """
        kind = self.load(name)
        if kind is None:
            return None
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise self._error(f"{self.describe(name)} is {kind!r}; it has to be a subclass of {path}")
        return kind()

    def describe(self, name: str) -> str:
        """Return the entry of a name in words, with its distribution."""
        return self._described(_entries_of(self._group)[name][0])

    def _described(self, entry: EntryPoint) -> str:
        of = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
        return f"the {self._what} {entry.value}{of}"


RULES = InstalledEntries("amanda.mappings", "mapping rule", RuleError)
"""Entry points: the name is a namespace, such as "mindspore"; the object a function `standard(context)`."""


def installed_rules() -> list[list[Any]]:
    """Return a rule for each entry, by name; its function is imported when it meets the first op."""
    return [[name, _Deferred(name)] for name in RULES.names()]


@dataclass(frozen=True)
class _Deferred:
    """A rule that is imported when the first op comes to it."""

    name: str

    def __call__(self, context: OpContext) -> None:
        self._function(context)

    @cached_property
    def _function(self) -> Callable[[OpContext], None]:
        rule: Callable[[OpContext], None] = RULES.load(self.name)
        if not callable(rule):
            raise RuleError(
                f"{RULES.describe(self.name)} is {rule!r}; it has to be a function of one context"
            )
        return rule


def _entries_of(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name: several where distributions have one name."""
    return _by_name(group, tuple(sys.path))


@cache
def _by_name(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    entries: dict[str, dict[str, EntryPoint]] = {}
    for entry in _scanned(path).select(group=group):
        entries.setdefault(entry.name, {})[entry.value] = entry
    return {name: tuple(one for _, one in sorted(same.items())) for name, same in entries.items()}


@lru_cache(1)
def _scanned(path: tuple[str, ...]) -> Any:
    """Return the entry points of all distributions on sys.path; a scan takes 50 ms, and three groups ask."""
    return entry_points()


def forget_installed() -> None:
    """Scan the distributions again at the next use."""
    _scanned.cache_clear()
    _by_name.cache_clear()

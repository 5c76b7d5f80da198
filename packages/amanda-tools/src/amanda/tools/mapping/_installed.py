"""Mapping rules that installed distributions bring, such as the driver of a further framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from amanda import OpContext
from amanda.errors import AmandaError
from amanda.tools.mapping._rules import RuleError

GROUP = "amanda.mappings"
"""Entry points: the name is a namespace, such as "mindspore"; the object a function `standard(context)`."""


def installed_rules() -> list[list[Any]]:
    """Return a rule for each entry, by name; its function is imported when it meets the first op."""
    return [[name, _Deferred(entries)] for name, entries in sorted(installed(GROUP).items())]


@dataclass(frozen=True)
class _Deferred:
    """A rule that is imported when the first op comes to it."""

    entries: tuple[EntryPoint, ...]

    def __call__(self, context: OpContext) -> None:
        self._function(context)

    @cached_property
    def _function(self) -> Callable[[OpContext], None]:
        found: Callable[[OpContext], None] = loaded(self.entries, "mapping rule", RuleError)
        if not callable(found):
            raise RuleError(f"{said(self.entries[0], 'mapping rule')} is {found!r}; it has to be a function "
                            "of one context")  # fmt: skip
        return found


@cache
def installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name: several where distributions have one name."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {name: tuple(one for _, one in sorted(entries.items())) for name, entries in found.items()}


def loaded(entries: tuple[EntryPoint, ...], what: str, error: type[AmandaError]) -> Any:
    """Return the object of the one entry.

    what: for messages, what the entry is.  Raises `error`, which says which distribution to upgrade or
    uninstall, where there are several entries or the one cannot be imported.
    """
    entry, *others = entries
    if others:
        rivals = " and ".join(said(one, what) for one in entries)
        raise error(f"{rivals} both serve {entry.name}; uninstall one of them")
    try:
        return entry.load()
    except Exception as reason:
        raise error(
            f"{said(entry, what)} cannot be imported: {reason!r}; upgrade or uninstall that distribution"
        ) from reason


def said(entry: EntryPoint, what: str) -> str:
    """Return an entry in words, with its distribution."""
    of = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    return f"the {what} {entry.value}{of}"

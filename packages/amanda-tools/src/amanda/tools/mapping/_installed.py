"""Mapping rules that installed distributions bring, such as the driver of a further framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._rules import RuleError

GROUP = "amanda.mappings"
"""Entry points: the name is a namespace, such as "mindspore"; the object a function `standard(context)`."""


def installed_rules() -> list[list[Any]]:
    """A rule for each entry, by name; its function is imported when it meets the first op."""
    return [[name, deferred] for name, deferred in sorted(_entries().items())]


@cache
def _entries() -> dict[str, Callable[[OpContext], None]]:
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {
        name: _Deferred(tuple(one for _, one in sorted(entries.items()))) for name, entries in found.items()
    }


@dataclass(frozen=True)
class _Deferred:
    """A rule that is imported when the first op comes to it."""

    entries: tuple[EntryPoint, ...]

    def __call__(self, context: OpContext) -> None:
        self._function(context)

    @cached_property
    def _function(self) -> Callable[[OpContext], None]:
        return _loaded(self.entries)


def _loaded(entries: tuple[EntryPoint, ...]) -> Callable[[OpContext], None]:
    """Raises RuleError, which says which distribution to upgrade or uninstall."""
    entry, *others = entries
    if others:
        rivals = " and ".join(_said(one) for one in entries)
        raise RuleError(f"{rivals} both map the ops of {entry.name}; uninstall one of them")
    try:
        function = entry.load()
    except Exception as error:
        raise RuleError(
            f"{_said(entry)} cannot be imported: {error!r}; upgrade or uninstall that distribution"
        ) from error
    if not callable(function):
        raise RuleError(f"{_said(entry)} is {function!r}; it has to be a function of one context")
    found: Callable[[OpContext], None] = function
    return found


def _said(entry: EntryPoint) -> str:
    of = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    return f"the mapping rule {entry.value}{of}"

"""Patterns of names that select ops, and the names that they were compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from amanda.errors import AmandaError
from amanda.options import Name

_SEEN = 10_000
_SHOWN = 8


Globs: TypeAlias = Sequence[Name] | Name | None
"""Names in which `*` and `?` stand for letters, or a single one; None for all, an empty list for none."""


class Patterns:
    """One option that selects ops by name: an op is selected if a pattern fits; None selects every op.

    option: how the user calls it.  patterns: names, in which `*` and `?` stand for letters; or a single one.
    met: the names that were not selected.  unused: the patterns that fitted no name, in order.
    """

    def __init__(self, option: str, patterns: Sequence[str] | str | None) -> None:
        listed = [patterns] if isinstance(patterns, str) else patterns
        self.option = option
        self.patterns = None if listed is None else tuple(map(self._spelt, listed))
        self.unused = dict.fromkeys(self.patterns or ())
        self.met: set[str] = set()

    @property
    def matched(self) -> bool:
        """True if a name was selected by a pattern."""
        return len(self.unused) < len(set(self.patterns or ()))

    def __call__(self, *names: str) -> bool:
        """Return whether an op that has these names is selected."""
        if self.patterns is None:
            return True
        spelt = [self._spelt(name) for name in names]
        fitting = [one for one in self.patterns if any(self._fits(name, one) for name in spelt)]
        for pattern in fitting:
            self.unused.pop(pattern, None)
        if not fitting and len(self.met) < _SEEN:
            self.met.update(spelt)
        return bool(fitting)

    def _spelt(self, name: str) -> str:
        return name

    def _fits(self, name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern)

    def __str__(self) -> str:
        return self.text(self.patterns or ())

    def text(self, patterns: Iterable[str]) -> str:
        """Return the option with some patterns, as "module=a+b"."""
        return f"{self.option}={'+'.join(patterns) or '[]'}"


class Paths(Patterns):
    """The same for paths of modules or name scopes: a path selects what lies in it; "/" is read as a dot."""

    def _spelt(self, name: str) -> str:
        return name.replace("/", ".")

    def _fits(self, name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


class ModulePaths(Paths):
    """Patterns of calls of modules: a path selects the module's own call alone, `*` stands within a part."""

    def _fits(self, name: str, pattern: str) -> bool:
        if not name or not pattern:  # the model itself
            return name == pattern
        return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def listed(option: str, value: Any, error: type[AmandaError]) -> list[str] | None:
    """Return the names or patterns that an option has, as a list; None for None.

    Raises `error` for a value that is neither a name nor names.
    """
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise error(f"{option} is {value!r}; give a name or a list of names")
    names = [value] if isinstance(value, str) else list(value)
    for name in names:
        if not isinstance(name, str) or not name:
            raise error(f"{option} has {name!r}; give names, or patterns with * and ?")
    return names


def unmatched(options: Iterable[Patterns], verb: str = "selected", noun: str = "op") -> list[str]:
    """Say which patterns no op fitted, with the nearest names that there were; nothing if no op was met."""
    sentences = []
    for option in options:
        if option.unused and (option.met or option.matched):
            sentences.append(f"no {noun} was {verb} by {option.text(option.unused)}{_hint(option)}")
        elif option.patterns == () and option.met and verb == "selected":
            sentences.append(f"no {noun} was selected by {option}; give None for all")
    return sentences


def as_remarks(texts: Iterable[str]) -> list[str]:
    """Make sentences of them, for a result."""
    return [text[0].upper() + text[1:] + "." * (not text.endswith("?")) for text in texts]


def _hint(option: Patterns) -> str:
    names = option.met - {""}
    near = [name for one in option.unused for name in get_close_matches(one, names, n=2, cutoff=0.5)]
    if near:
        return f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    some = sorted(names)[:_SHOWN]
    return f"; there were {', '.join(some)}{' and others' * (len(names) > len(some))}" if some else ""

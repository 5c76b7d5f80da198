"""Ids of traced functions, the same in every process that uses the same ones first in the same order."""

import re
import weakref
from typing import Any

from amanda.backend import digest

_COUNTED = re.compile(r"^__(inference|forward|backward)_(.*?)(?:_\d+)*$")


class Identities:
    """A number for each graph of a function: its name without counters, and which one of that name."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}

    def of(self, graph: Any, name: str) -> int:
        """The number of a graph, which functions of this runtime name were made of."""
        known = self._known.get(graph)
        if known is None:
            kind, base = parts(name)
            key = f"backward {base}" if kind == "backward" else base
            self._counts[key] = self._counts.get(key, 0) + 1
            known = self._known[graph] = digest("function", key, self._counts[key])
        return known


def parts(name: str) -> tuple[str, str]:
    """Of a runtime name, what kind of function it is, and the name that the user gave."""
    kind, base = "inference", name
    while kind == "inference" and (match := _COUNTED.match(base)):
        kind, base = match.group(1), match.group(2)
    return kind, base

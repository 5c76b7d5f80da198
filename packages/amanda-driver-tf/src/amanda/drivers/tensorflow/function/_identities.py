"""Ids of traced functions, the same in every process that uses the same ones first in the same order."""

import re
import weakref
from typing import Any

from amanda.backend import digest

_RUNTIME_NAME = re.compile(r"^__(inference|forward|backward)_(.*?)(?:_\d+)*$")


class Identities:
    """Numbers of the graphs of functions: digests of a name without counters and a count of that name."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}

    def of(self, graph: Any, name: str) -> int:
        """Return the number of a graph, from the runtime name of its function."""
        identity = self._by_graph.get(graph)
        if identity is None:
            kind, base = split_name(name)
            key = f"backward {base}" if kind == "backward" else base
            self._counts[key] = self._counts.get(key, 0) + 1
            identity = self._by_graph[graph] = digest("function", key, self._counts[key])
        return identity


def split_name(name: str) -> tuple[str, str]:
    """Split a runtime name into "inference", "forward" or "backward" and the user's name."""
    kind, base = "inference", name
    while kind == "inference" and (match := _RUNTIME_NAME.match(base)):
        kind, base = match.group(1), match.group(2)
    return kind, base

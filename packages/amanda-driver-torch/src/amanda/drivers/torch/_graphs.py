"""Deep graphs: torch frees a chain of nodes that Python has looked at by recursion."""

import threading
from typing import Any

RELIEF = "amanda.relief"


class _Freeing(threading.local):
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.under_way = False


class Relief:
    """Held by a node, and holds those behind it: they are freed after the node, not within its freeing."""

    __slots__ = ("_behind", "_freeing")
    _of_thread = _Freeing()

    def __init__(self, behind: list[Any]) -> None:
        self._behind = behind
        self._freeing = self._of_thread

    def __del__(self) -> None:
        freeing = self._freeing
        freeing.waiting.append(self._behind)
        del self._behind
        if freeing.under_way:
            return
        freeing.under_way = True
        try:
            while freeing.waiting:
                freeing.waiting.pop()
        finally:
            freeing.under_way = False


def relieve(node: Any) -> None:
    """Keep torch from freeing a deep graph by recursion; called on some of the nodes that are looked at."""
    behind = [child for child, _ in node.next_functions if child is not None]
    node.metadata.setdefault(RELIEF, Relief(behind))

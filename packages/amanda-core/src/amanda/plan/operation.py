"""The result of `get_op` and `get_backward_op` where a framework has no object for an operator."""

from __future__ import annotations

from collections.abc import Hashable


class Operation:
    """An operator by name: equal to another of its class that stands for the same one.

    __name__: what the op computes, in the framework's words: "dot_general", "Conv2D".
    """

    __slots__ = ("__name__", "__weakref__", "_key")

    def __init__(self, name: str, *key: Hashable) -> None:
        """key: tells operators of one name apart."""
        self.__name__ = name
        self._key = (name, *key)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

"""Operators by name: results of `get_op` and `get_backward_op` where a framework has no operator objects."""

from __future__ import annotations

from collections.abc import Hashable


class Operation:
    """An operator by name: equal to another object of its class with the same name and key.

    __name__: the framework's name of the operator: "dot_general", "Conv2D".
    """

    __slots__ = ("__name__", "__weakref__", "_key")

    def __init__(self, name: str, *key: Hashable) -> None:
        """key: distinguishes operators of one name."""
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

"""Replacing attributes of modules and classes for a while."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

_MISSING = object()


class Attributes:
    """Attributes set for a while, and what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until `restore`."""
        self._before.append((holder, name, vars(holder).get(name, _MISSING)))
        setattr(holder, name, value)

    def restore(self) -> None:
        """Undo every `set`, last first."""
        while self._before:
            holder, name, value = self._before[-1]
            if value is not _MISSING:
                setattr(holder, name, value)
            elif name in vars(holder):  # not if `set` was interrupted
                delattr(holder, name)
            self._before.pop()


def replace_references(
    attributes: Attributes, stand_ins: Iterable[tuple[Any, Any]], holders: Sequence[Any]
) -> None:
    """Let every attribute of a holder that is a target be its stand-in.

    stand_ins: pairs of target and stand-in.  holders: modules and classes.
    """
    by_target = {id(target): stand_in for target, stand_in in stand_ins}
    for holder in holders:
        for name in dir(holder):
            value = inspect.getattr_static(holder, name, None)
            value = value.__func__ if isinstance(value, staticmethod) else value
            if id(value) in by_target:
                attributes.set(holder, name, by_target[id(value)])

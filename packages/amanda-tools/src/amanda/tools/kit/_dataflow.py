"""What is known of tensors that live, and which op made which."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_KNOWN = 100_000


class TensorMap(Generic[T]):
    """A value for each tensor that lives, of any framework; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref[Any], T]] = {}

    def __setitem__(self, tensor: Any, value: T) -> None:
        """Take a value for a tensor; raises TypeError for what no weak reference can be made to."""
        key = self.key(tensor)

        def forget(gone: Any) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is gone:
                del self._known[key]

        self._known[key] = weakref.ref(tensor, forget), value

    def get(self, tensor: Any) -> T | None:
        """Return the value of a tensor; None of an unknown one."""
        found = self._known.get(self.key(tensor))
        return found[1] if found is not None and found[0]() is not None else None

    @staticmethod
    def key(tensor: Any) -> Hashable:
        """Return what tells a tensor from all others that live; TensorFlow numbers them."""
        return getattr(tensor, "_id", None) or id(tensor)


class Dataflow(Generic[T]):
    """Numbers tensors as they are met, and remembers what made each, also when it is gone.

    A tensor gets another number when an op gives it again, as one in place does. What makes a tensor is a
    value of the tool's own, such as a node.  The last 100,000 tensors that were made are known.
    """

    def __init__(self) -> None:
        self._numbers = TensorMap[int]()
        self._makers: dict[int, T] = {}
        self._next = count()

    def number(self, tensor: Any) -> int | None:
        """Return the number of a tensor, a new one for one that is not known; None for what is no tensor."""
        known = self._numbers.get(tensor)
        return self._renumbered(tensor) if known is None else known

    def made(self, maker: T, tensors: Iterable[Any]) -> None:
        """Remember what has made tensors, or what a routine gave in their place."""
        for tensor in tensors:
            number = self._renumbered(tensor)
            if number is not None:
                self._makers[number] = maker
                self._makers.pop(number - _KNOWN, None)

    def maker(self, number: int | None) -> T | None:
        """Return what made the tensor of a number; None if that is not known."""
        return None if number is None else self._makers.get(number)

    def _renumbered(self, tensor: Any) -> int | None:
        number = next(self._next)
        try:
            self._numbers[tensor] = number
        except TypeError:
            return None
        return number

"""Writes into memory that several tensors share."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from amanda.tools.trace._values import Span, Values

_KEPT = 128
"""Most writes into one memory that are kept; a tensor that was not read meanwhile loses earlier ones."""
_BASE = 1 << 20
_WORK: Any = 10_000


class Write(NamedTuple):
    """A write by an op.  serial: number of the write."""

    serial: int
    op: int
    span: Span


class Memory:
    """The writes into each memory, as long as the memory is in use."""

    def __init__(self, values: Values) -> None:
        self.serial = 0
        self._values = values
        self._writes: WeakKeyDictionary[Any, list[Write]] = WeakKeyDictionary()

    def note(self, tensor: Any, op: int) -> None:
        """Record that an op has written a tensor."""
        found = self._values.memory(tensor)
        if found is not None:
            self.serial += 1
            writes = self._writes.setdefault(found[0], [])
            writes.append(Write(self.serial, op, found[1]))
            del writes[:-_KEPT]

    def since(self, tensor: Any, serial: int) -> list[Write]:
        """Return the writes after one that left something in a tensor, in their order."""
        found: list[Write] = []
        place = None if serial == self.serial else self._values.memory(tensor)
        if place is None:
            return found
        memory, span = place
        for write in reversed(self._writes.get(memory, ())):
            if write.serial <= serial:
                break
            if write.span == span:
                found.append(write)
                break  # earlier writes are overwritten
            if overlap(write.span, span):
                found.append(write)
        return found[::-1]


def overlap(one: Span, other: Span) -> bool:
    """Return True if two tensors of one memory share an element, or if that takes long to find out."""
    try:
        return bool(np.shares_memory(_stand_in(one), _stand_in(other), max_work=_WORK))
    except (np.exceptions.TooHardError, ValueError):
        return True


@lru_cache(1024)
def _stand_in(span: Span) -> Any:
    """Return an array at addresses like the tensor's, whose elements nobody reads."""
    interface = {
        "version": 3, "shape": span.shape, "typestr": f"|V{span.width}",
        "data": (_BASE + span.start * span.width, True),
        "strides": tuple(step * span.width for step in span.strides),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))

"""Who has written into memory that several tensors share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from amanda.tools.trace._values import Span, Values

_KEPT = 128
"""So many writes into one memory are known; the tensors that were not read since lose earlier ones."""


class Write(NamedTuple):
    """A write by an op. serial: counts writes."""

    serial: int
    op: int
    span: Span


class Memory:
    """The writes into memory that lives."""

    def __init__(self) -> None:
        self.serial = 0
        self._writes: dict[Hashable, tuple[Any, list[Write]]] = {}
        self._swept_at = 1024

    def note(self, values: Values, tensor: Any, op: int) -> None:
        """Record that an op has written a tensor."""
        span = values.span(tensor)
        if span is None:
            return
        self.serial += 1
        if span.memory not in self._writes:
            self._sweep(values)
            self._writes[span.memory] = values.hold_memory(tensor), []
        writes = self._writes[span.memory][1]
        writes.append(Write(self.serial, op, span))
        del writes[:-_KEPT]

    def since(self, values: Values, tensor: Any, serial: int) -> list[Write]:
        """The writes since then that left something in a tensor, in their order."""
        if serial == self.serial:
            return []
        span = values.span(tensor)
        found: list[Write] = []
        for write in reversed(self._writes[span.memory][1] if span and span.memory in self._writes else ()):
            if write.serial <= serial:
                break
            assert span is not None
            if write.span == span:
                found.append(write)
                break  # all that was before is overwritten
            if overlap(write.span, span):
                found.append(write)
        return found[::-1]

    def _sweep(self, values: Values) -> None:
        if len(self._writes) < self._swept_at:
            return
        self._writes = {
            key: entry for key, entry in self._writes.items() if not values.is_memory_gone(entry[0])
        }
        self._swept_at = max(1024, 2 * len(self._writes))


def overlap(one: Span, other: Span) -> bool:
    """Return True if two tensors in one memory share an element, or if that takes too long to compute."""
    if 0 in one.shape or 0 in other.shape:
        return False
    first, second = _bounds(one), _bounds(other)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    try:
        return bool(np.shares_memory(_stand_in(one), _stand_in(other), max_work=_WORK))
    except (np.exceptions.TooHardError, ValueError):
        return True


def _bounds(span: Span) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    reach = [(n - 1) * step for n, step in zip(span.shape, span.strides, strict=True)]
    least, most = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return (span.start + least) * span.width, (span.start + most + 1) * span.width


def _stand_in(span: Span) -> Any:
    """An array at addresses like the tensor's, whose elements nobody reads."""

    class Described:
        __array_interface__ = {  # noqa: RUF012
            "version": 3, "shape": span.shape, "typestr": f"|V{span.width}",
            "data": (_BASE + span.start * span.width, True),
            "strides": tuple(step * span.width for step in span.strides),
        }  # fmt: skip

    return np.asarray(Described())


_BASE = 1 << 20
_WORK: Any = 10_000

"""The recorded tensor that each living tensor is, after the writes into memory that several share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.trace._graph import Position
from amanda.tools.trace._recorder import UNKNOWN, ProgramOp, Recorder
from amanda.tools.trace._values import Span, Values

_KEPT = 128
"""Most writes into one memory that are kept; a tensor that was not read meanwhile loses earlier ones."""
_BASE = 1 << 20
_WORK: Any = 10_000
_STATE = ("parameter", "buffer")
"""Kinds that a tensor keeps when it is written."""


class Given(NamedTuple):
    """A tensor that an op was given: a weak reference, its index and version before the op."""

    reference: Callable[[], Any]
    tensor: int
    version: int | None


@dataclass(slots=True, eq=False)
class _Known:
    """A living tensor: its index, as of a write into its memory, and a weak reference."""

    index: int
    serial: int
    reference: Callable[[], Any]


class Write(NamedTuple):
    """A write by an op.  serial: number of the write."""

    serial: int
    op: int
    span: Span


class Living:
    """The living tensors of a framework, held weakly: what they were recorded as, and who wrote their memory.

    serial: of the last write.
    """

    def __init__(self, values: Values, recorder: Recorder) -> None:
        self.values = values
        self.serial = 0
        self._recorder = recorder
        self._known: dict[int, _Known] = {}
        self._writes: weakref.WeakKeyDictionary[Any, list[Write]] = weakref.WeakKeyDictionary()

    def given(self, value: Any) -> Given | None:
        """Return an input as it is before the op; None for a value that is no recorded tensor."""
        known = self._known.get(id(value))
        return None if known is None else Given(known.reference, known.index, self.values.version(value))

    def last_index(self, tensor: Any) -> int | None:
        """Return the index of a tensor as of the last op that read or made it; None for an unknown one."""
        known = self._known.get(id(tensor))
        return None if known is None else known.index

    def current_index(self, tensor: Any) -> int | None:
        """Return the index of a tensor at this moment, after recording the writes into its memory."""
        known = self._known.get(id(tensor))
        if known is None:
            return None
        for write in self.writes_since(tensor, known.serial):
            known.index = self.add_version(write.op, known.index, tensor)
            self._recorder.ops[write.op].parts.append(known.index)
        known.serial = self.serial
        return known.index

    def note_write(self, tensor: Any, op: int) -> None:
        """Note that an op has written a tensor, for as long as its memory is in use."""
        found = self.values.memory(tensor)
        if found is not None:
            self.serial += 1
            writes = self._writes.setdefault(found[0], [])
            writes.append(Write(self.serial, op, found[1]))
            del writes[:-_KEPT]

    def writes_since(self, tensor: Any, serial: int) -> list[Write]:
        """Return the writes after one that left something in a tensor, in their order."""
        found: list[Write] = []
        place = None if serial == self.serial else self.values.memory(tensor)
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

    def add_version(self, op: int, before: int | None, tensor: Any) -> int:
        """Record a tensor as an op has left it that wrote it, or a part of its memory.

        before: its index until then; None for a gradient that begins.
        """
        kind, name = "gradient", None
        if before is not None:
            old = self._recorder.values[before]
            kind, name = old.tensor.kind, old.tensor.name
            old.consumers[op] = None
        described = self.values.describe(tensor, kind=kind, name=name, producer=op, alias_of=before)
        return self._recorder.add_tensor(described, same=True)

    def identify(self, tensor: Any, index: int) -> None:
        """Note the index of a living tensor."""
        known = self._known.get(id(tensor))
        if known is None:
            self._known[id(tensor)] = _Known(index, self.serial, self._reference(tensor, id(tensor)))
        else:
            known.index, known.serial = index, self.serial

    def _reference(self, tensor: Any, key: int) -> Callable[[], Any]:
        try:
            return weakref.ref(tensor, lambda _: self._known.pop(key, None))
        except TypeError:
            return lambda: tensor

    def identify_all(
        self, values: Sequence[Any], positions: Sequence[Position], only_changed: bool = False
    ) -> None:
        """Note the indices of tensors; only_changed: of those alone that are unknown, or written since."""
        for tensor, index in self._pairs(values, positions):
            known = self._known.get(id(tensor)) if only_changed else None
            if known is None or self.writes_since(tensor, known.serial):
                self.identify(tensor, index)

    def _pairs(self, values: Sequence[Any], positions: Sequence[Position]) -> Iterator[tuple[Any, int]]:
        for value, position in zip(values, positions, strict=False):
            if isinstance(position, tuple):
                if isinstance(value, (list, tuple)):
                    yield from self._pairs(value, position)
            elif position is not None and self.values.is_tensor(value):
                yield value, position

    def root_of(self, value: Any) -> int | None:
        """Return the index that a tensor had before it was first written; UNKNOWN for an unknown tensor."""
        if not self.values.is_tensor(value):
            return None
        index = None if self.values.is_handle(value) else self.last_index(value)
        return UNKNOWN if index is None else self._recorder.values[index].root

    def read(self, value: Any, kind: str | None = None) -> int | None:
        """Return the index of an input, after recording it if it comes from outside, as of a kind."""
        if not self.values.is_tensor(value):
            return None
        index = self.current_index(value)
        if index is None:
            outer = self.values.outer(value)
            index = outer if outer is None or isinstance(outer, int) else self.read(outer)
            if index is None:
                found, name = self.values.origin(value)
                described = self.values.describe(value, kind=kind or found, name=name)
                index = self._recorder.add_tensor(described)
            self.identify(value, index)
        return index

    def make(self, place: ProgramOp, value: Any, op: int, given: Sequence[Given]) -> int | None:
        """Return the index of an output, after recording it.  given: the tensors among the inputs."""
        if not self.values.is_tensor(value):
            return None
        alias = self.last_index(value)
        kind, name = place.facts.makes, self.values.name(value)
        same = alias is not None
        if alias is None:
            alias = self._sharing(value, () if place.symbolic else given) if kind else given[0].tensor
        owner = None if alias is None else self._recorder.values[alias]
        if owner is not None and same and place.symbolic and owner.tensor.producer is None:
            owner.tensor = replace(owner.tensor, producer=op, kind=kind)  # a loop reads it before it is made
            return alias
        if owner is not None and (not kind or (owner.tensor.kind in _STATE and same)):
            kind, name = owner.tensor.kind, owner.tensor.name
        described = self.values.describe(value, kind=kind, name=name, producer=op, alias_of=alias)
        return self._recorder.add_tensor(described, same, from_outside=place.facts.brings_in)

    def _sharing(self, value: Any, given: Sequence[Given]) -> int | None:
        """Return the index of the given tensor whose memory a value shares."""
        place = self.values.memory(value) if given else None
        for one in given if place is not None else ():
            tensor = one.reference()
            other = None if tensor is None else self.values.memory(tensor)
            if other is not None and place is not None and other[0] is place[0]:
                return one.tensor
        return None


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

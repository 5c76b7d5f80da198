"""Which recorded tensor each living one is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from amanda.tools.trace._graph import Position
from amanda.tools.trace._memory import Memory
from amanda.tools.trace._recorder import UNKNOWN, Place, Recorder
from amanda.tools.trace._values import Values

_STATE = ("parameter", "buffer")
"""Kinds of tensors that stay what they are when they are written."""


class _Known:
    """A tensor that lives: its index, as of a write into its memory, and the weak reference."""

    __slots__ = ("held", "index", "serial")

    def __init__(self, index: int, serial: int, held: Any) -> None:
        self.index = index
        self.serial = serial
        self.held = held


class Living:
    """The tensors of a framework that live, held weakly, and what they were recorded as."""

    def __init__(self, values: Values, recorder: Recorder) -> None:
        self.values = values
        self.memory = Memory()
        self._recorder = recorder
        self._known: dict[Hashable, _Known] = {}
        self._swept_at = 4096

    # ---- what is known ----

    def last_index(self, tensor: Any) -> int | None:
        """Return the index that a tensor had when an op read or made it; None for an unknown tensor."""
        known = self._known.get(self.values.key(tensor))
        return None if known is None else known.index

    def is_current(self, tensor: Any) -> bool:
        """Return True if a tensor is known, and nothing was written into its memory since."""
        known = self._known.get(self.values.key(tensor))
        return known is not None and not self.memory.since(self.values, tensor, known.serial)

    def index_of(self, tensor: Any) -> int | None:
        """Return the present index of a tensor: another one after each write into its elements."""
        known = self._known.get(self.values.key(tensor))
        if known is None:
            return None
        for write in self.memory.since(self.values, tensor, known.serial):
            known.index = self.written_by(write.op, known.index, tensor)
            self._recorder.ops[write.op].parts.append(known.index)
        known.serial = self.memory.serial
        return known.index

    def written_by(self, op: int, before: int, tensor: Any) -> int:
        """A new tensor: what one is after an op has written it, or a part of its memory."""
        old = self._recorder.values[before]
        self._recorder.add_consumer(before, op)
        described = self.values.describe(tensor)
        return self._recorder.add_tensor(described, old.kind, old.name, op, before, same=True)

    def know(self, tensor: Any, index: int) -> None:
        """Map a living tensor to a recorded one."""
        key = self.values.key(tensor)
        known = self._known.get(key)
        if known is not None:
            known.index, known.serial = index, self.memory.serial
            return
        if len(self._known) >= self._swept_at:
            self._sweep()
        held = self.values.hold(tensor, key, self._forget)
        self._known[key] = _Known(index, self.memory.serial, held)

    def know_all(self, values: Sequence[Any], positions: Sequence[Position]) -> None:
        """The same for values, and lists of values."""
        for value, position in zip(values, positions, strict=False):
            if isinstance(position, tuple):
                if isinstance(value, (list, tuple)):
                    self.know_all(value, position)
            elif position is not None and self.values.is_tensor(value):
                self.know(value, position)

    def recall_all(self, values: Sequence[Any], positions: Sequence[Position]) -> None:
        """The same, for those alone of which nothing is known, or that were written since."""
        for value, position in zip(values, positions, strict=False):
            if isinstance(position, tuple):
                if isinstance(value, (list, tuple)):
                    self.recall_all(value, position)
            elif position is not None and self.values.is_tensor(value) and not self.is_current(value):
                self.know(value, position)

    # ---- what goes into an op ----

    def root_of(self, value: Any) -> Position:
        """Return the index of a value before its first write; UNKNOWN for an unknown tensor."""
        if isinstance(value, (list, tuple)):
            roots = tuple(map(self.root_of, value))
            return roots if any(one is not None for one in roots) else None  # type: ignore[return-value]
        if not self.values.is_tensor(value):
            return None
        index = None if self.values.is_handle(value) else self.last_index(value)
        return UNKNOWN if index is None else self._recorder.values[index].root

    def read_all(self, values: Sequence[Any]) -> tuple[Position, ...]:
        """Return the recorded tensor of each input."""
        return tuple(self.read(value) for value in values)

    def read(self, value: Any, kind: str | None = None) -> Position:
        """Return the recorded tensor of an input; an unknown one comes from outside, of that kind."""
        if isinstance(value, (list, tuple)):
            found = tuple(self.read(one, kind) for one in value)
            return found if any(one is not None for one in found) else None  # type: ignore[return-value]
        if not self.values.is_tensor(value):
            return None
        index = self.index_of(value)
        return self._from_outside(value, kind) if index is None else index

    def _from_outside(self, tensor: Any, kind: str | None) -> int:
        outer = self.values.outer(tensor)
        index = outer if outer is None or isinstance(outer, int) else self.read(outer)
        if not isinstance(index, int):
            found, name = self.values.origin(tensor)
            index = self._recorder.add_tensor(self.values.describe(tensor), kind or found, name)
        self.know(tensor, index)
        return index

    # ---- what comes out of it ----

    def make(
        self, place: Place, value: Any, op: int, read: Sequence[int] = (), near: Sequence[Any] = ()
    ) -> Position:
        """New tensors for an output. read: what the op has read; near: the same while they live."""
        if isinstance(value, (list, tuple)):
            return tuple(self.make(place, one, op, read, near) for one in value)  # type: ignore[misc]
        if not self.values.is_tensor(value):
            return None
        alias = self.last_index(value)
        kind, name = place.makes, self.values.name(value)
        same = alias is not None
        if alias is None:
            alias = self._sharing(value, read, near) if kind else read[0]
        else:
            old = self._recorder.values[alias]
            if place.symbolic and old.producer is None:
                old.producer, old.kind = op, kind  # a loop has read it before it is made
                return alias
        owner = None if alias is None else self._recorder.values[alias]
        if owner is not None and (not kind or (owner.kind in _STATE and same)):
            kind, name = owner.kind, owner.name
        index = self._recorder.add_tensor(self.values.describe(value), kind, name, op, alias, same)
        if place.brings_in:
            self._recorder.values[index].root = UNKNOWN
        return index

    def _sharing(self, value: Any, read: Sequence[int], near: Sequence[Any]) -> int | None:
        """The tensor read whose memory a value shares."""
        span = self.values.span(value) if near else None
        for tensor, index in zip(near, read, strict=False) if span is not None else ():
            other = None if tensor is None else self.values.span(tensor)
            if other is not None and span is not None and other.memory == span.memory:
                return index
        return None

    def _forget(self, key: Hashable) -> None:
        self._known.pop(key, None)

    def _sweep(self) -> None:
        gone = [key for key, known in self._known.copy().items() if self.values.is_gone(known.held)]
        for key in gone:
            del self._known[key]
        self._swept_at = max(4096, 2 * len(self._known))

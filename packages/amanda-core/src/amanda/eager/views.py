"""Keep views and their bases one memory where a routine gives a value in the place of a view.

The value that a routine gives has memory of its own, so a program that writes into it, or into the base of
the view, would no longer see the write on the other side. `Views` knows which value stands for which view;
after each op that writes, it copies what was written across.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from amanda.plan.lifetime import mortality
from amanda.plan.tensors import spread
from amanda.scope.state import when_enabled_again

Label = tuple[str, str]
"""Name of an op, and the user's line."""


class Tie(ABC):
    """A value that a routine gave, and the view whose place it took.

    ends: the memory of the value, and that of the view.
    """

    ends: tuple[Hashable, Hashable]

    @property
    @abstractmethod
    def value(self) -> Any:
        """The value; None if the program has let go of it."""

    @property
    def is_link(self) -> bool:
        """Return True if the program has let go of the value, so that the tie only joins others."""
        return self.value is None

    @property
    @abstractmethod
    def view(self) -> Any:
        """The view, outside autodiff."""

    @abstractmethod
    def carry(self, start: Hashable, written: Any) -> Any:
        """Copy what was written at one end to the other; return what that writes there, None if nothing.

        start: the memory that was written.  written: which part of it.
        """

    @abstractmethod
    def drifted(self) -> Any:
        """Return the side that was written since the last copy, unseen by the driver; None if neither was."""

    @abstractmethod
    def rejoin(self) -> bool:
        """Make the value a view again if it holds what the view holds; return whether it is one."""


class Views(ABC):
    """The ties that are alive.

    watching: whether there were any since the last scope opened. From then on ops that write are executed
    in Python, so that their writes are seen.
    """

    def __init__(self) -> None:
        self.watching = False
        _all.add(self)
        self._ties: dict[Hashable, list[Tie]] = {}
        self._labels: dict[Tie, Label] = {}
        self._lost: list[Label] = []

    @abstractmethod
    def memory(self, value: Any) -> Hashable:
        """Identity of the memory that a tensor lies in; None where it has none that can be told."""

    def parts_of(self, value: Any) -> Sequence[Any]:
        """Return the tensors with one memory each that a tensor consists of: mostly itself."""
        return (value,)

    def keeps_alive(self, view: Any, value: Any) -> bool:
        """Return True if the framework keeps a tensor while the program has a view of it."""
        return True

    @abstractmethod
    def is_lent(self, value: Any) -> bool:
        """Return whether a tensor lies in memory that is not the framework's own, such as a NumPy array's."""

    @abstractmethod
    def tie(
        self, view: Any, value: Any, is_input: bool, on_death: Callable[[Tie], None],
        holders: Sequence[Any] = (),
    ) -> Tie:  # fmt: skip
        """Tie a value to a view.

        is_input: whether that is a tensor which the op was given, not one that the op made.
        holders: the tensors of the program in whose memory the value lies, if it is none itself.
        """

    @abstractmethod
    def laid_out(self, view: Any, value: Any) -> Any:
        """Copy a tensor, differentiably, into memory of its own, laid out as that of a view if it can be."""

    @abstractmethod
    def shares(self, value: Any) -> bool:
        """Return whether a tensor is known to share its memory."""

    @abstractmethod
    def alike(self, one: Any, other: Any) -> bool:
        """Return whether two tensors lie in memory alike, so that an op makes views of both or of neither."""

    @abstractmethod
    def parts(self, values: Sequence[Any]) -> dict[Hashable, Any]:
        """Return which part of which memory each of some tensors is."""

    def __bool__(self) -> bool:
        return bool(self._ties)

    def given_before(
        self,
        own: Sequence[Any],
        given: Sequence[Any],
        outputs: Sequence[Any],
        again: Callable[[], Sequence[Any]],
        label: Label,
    ) -> None:
        """Tie the values that routines gave as inputs where outputs of the op lie in their memory.

        again: runs the op on its own inputs, to see whether it makes views of these.
        """
        results = spread(outputs)
        reached = [self._memories(one) for one in results]
        for view, value in _pairs(own, given):
            parts = self.parts_of(view), self.parts_of(value)
            if len(parts[0]) != len(parts[1]):
                continue
            for own_part, part in zip(*parts, strict=True):
                memory = self.memory(part)
                lying = [
                    one for one, memories in zip(results, reached, strict=True)
                    if any(self._reaches(each, {memory}) for each in memories)
                ]  # fmt: skip
                if memory is None or not lying:
                    continue
                is_whole = part is value and all(self.keeps_alive(one, value) for one in lying)
                if own_part.shape != part.shape or not (
                    (is_whole and self.alike(own_part, part))
                    or any(self.memory(own_part) in self._memories(one) for one in spread(again()))
                ):
                    continue
                self._add(own_part, part, True, label, () if is_whole else lying)

    def given_after(
        self, inputs: Sequence[Any], outputs: Sequence[Any], given: Sequence[Any], label: Label
    ) -> list[Any]:
        """Tie the values that routines gave as outputs where these are views; return the values to use."""
        near = {id(one): self._memories(one) for one in spread(inputs)}
        return [self._stand_in(old, new, near, label) for old, new in zip(outputs, given, strict=True)]

    def wrote(self, values: Sequence[Any]) -> None:
        """Copy what an op has written into these tensors to where the program expects to see it."""
        parts = [part for value in values for part in self.parts_of(value)]
        values = [part for part in parts if self.memory(part) in self._ties]
        if values:
            self._spread_out(self.parts(values))

    def settle(self) -> None:
        """Copy what was written where no op was seen, such as under `amanda.disabled()`."""
        for tie in list(self._labels):
            side = tie.drifted()
            if side is not None:
                try:
                    self._spread_out(self.parts([side]))
                except Exception:  # the framework forbids the write, as into a tensor that was expanded
                    self._lost.append(self._labels[tie])

    def release(self) -> Iterator[Label]:
        """Make views of the values again, as the last scope closes; give where that would change a value."""
        self.settle()
        for tie in self._each():
            if not tie.rejoin():
                yield self._labels[tie]
        self._ties.clear()
        yield from self._lost
        self._labels.clear()
        self._lost.clear()
        self.watching = False

    def _memories(self, value: Any) -> set[Hashable]:
        """Return the memories that a tensor lies in."""
        return {memory for memory in map(self.memory, self.parts_of(value)) if memory is not None}

    def _stand_in(self, view: Any, value: Any, inputs: dict[int, set[Hashable]], label: Label) -> Any:
        if value is view:
            return value
        if isinstance(view, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(view):
                return value
            each = [self._stand_in(*pair, inputs, label) for pair in zip(view, value, strict=True)]
            return tuple(each) if isinstance(value, tuple) else each
        memory, own = self.memory(view), self.memory(value)
        memories = set().union(*inputs.values())
        if memory is None:
            return self._composite(view, value, memories, label)
        if own is None or own == memory or view.shape != value.shape:
            return value  # no view can be a tensor of another shape, which a differentiable routine may give
        if not (self._reaches(memory, memories) or self.is_lent(view)):
            return value
        if own in memories or own in self._ties or self.shares(value) or not self.alike(view, value):
            value = self.laid_out(view, value)
        self._add(view, value, id(view) in inputs, label)
        return value

    def _reaches(self, memory: Hashable, memories: set[Hashable]) -> bool:
        """Return True for one of the memories, or where ties lead to one, as of a view made within the op."""
        waiting = [memory]
        while waiting:
            if not memories.isdisjoint(waiting):
                return True
            ties = [tie for start in waiting for tie in self._ties.get(start, ()) if tie.ends[0] == start]
            waiting = [tie.ends[1] for tie in ties]
        return False

    def _composite(self, view: Any, value: Any, memories: set[Hashable], label: Label) -> Any:
        """Tie the parts of a value, such as the values of a sparse tensor, to those whose place they took."""
        pairs = self._paired(view, value, memories)
        if any(self.memory(own) in memories or self.memory(own) in self._ties for _, own in pairs):
            value = self.laid_out(view, value)
            pairs = self._paired(view, value, memories)
        for part, own in pairs:
            self._add(part, own, False, label, (value,))
        return value

    def _paired(self, view: Any, value: Any, memories: set[Hashable]) -> list[tuple[Any, Any]]:
        """Return parts of a view in some memories, each with the part of a value that stands for it."""
        parts = self.parts_of(view), self.parts_of(value)
        return [
            (part, own) for part, own in zip(*parts, strict=False)
            if part.shape == own.shape and self.memory(part) != self.memory(own)
            and self._reaches(self.memory(part), memories)
        ]  # fmt: skip

    def _add(self, view: Any, value: Any, is_input: bool, label: Label, holders: Sequence[Any] = ()) -> None:
        start = self.memory(value)
        if self._reaches(self.memory(view), {start}):
            return  # ties make no circle
        if any(tie.ends[0] == start for tie in self._ties.get(start, ())):
            return
        tie = self.tie(view, value, is_input, self._drop, holders)
        self._labels[tie] = label
        for memory in tie.ends:
            self._ties.setdefault(memory, []).append(tie)
        if not self.watching:
            self.watching = True
            for layer in list(mortality.layers):
                layer.watch_writes()

    def _drop(self, tie: Tie) -> None:
        """Forget a tie whose value is gone, and those that it alone was reached from.

        While views of the value stand for something, it is a link between that and the base.
        """
        value, view = tie.ends
        if tie not in self._labels or any(one is not tie for one in self._ties.get(value, ())):
            return
        del self._labels[tie]
        for memory in tie.ends:
            ties = self._ties.get(memory, [])
            if tie in ties:
                ties.remove(tie)
            if not ties:
                self._ties.pop(memory, None)
        for link in list(self._ties.get(view, ())):
            if link.ends[0] == view and link.is_link:
                self._drop(link)

    def _each(self) -> list[Tie]:
        return [tie for tie in list(self._labels) if tie.value is not None]

    def _spread_out(self, parts: dict[Hashable, Any]) -> None:
        """Copy from memory to memory: ties make no circle, because each begins with a value of its own."""
        waiting: list[tuple[Hashable, Any, Tie | None]] = [(*part, None) for part in parts.items()]
        while waiting:
            memory, written, by = waiting.pop(0)
            for tie in list(self._ties.get(memory, ())):
                if tie is not by and (reached := tie.carry(memory, written)) is not None:
                    waiting.append((tie.ends[memory == tie.ends[0]], reached, tie))


def settle_all() -> None:
    """Copy across what was written while instrumentation was switched off."""
    for views in list(_all):
        views.settle()


_all: weakref.WeakSet[Views] = weakref.WeakSet()
when_enabled_again.append(settle_all)


def _pairs(own: Sequence[Any], given: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each value that routines gave beside the one that was there."""
    pairs: list[tuple[Any, Any]] = []
    for old, new in zip(own, given, strict=True):
        if new is old:
            continue
        if not isinstance(old, (list, tuple)):
            pairs.append((old, new))
        elif isinstance(new, (list, tuple)) and len(new) == len(old):
            pairs += _pairs(old, new)
    return pairs

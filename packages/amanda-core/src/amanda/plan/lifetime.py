"""The lives of plans: they end with their tool, their model or their parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.interceptor.registry import codes

if TYPE_CHECKING:
    from amanda.plan.layer import Layer
    from amanda.plan.tools import AnyTool

SlotOf = Callable[[Any, Any], Hashable]
"""Gives the name of the slot in which an object holds another, and what fits there; None where none is."""


class Slots:
    """Slots of objects: what is put anew into one is the same parameter, though it is another tensor.

    So libraries that load a module's parameters at each call of it leave the ops what they were.
    """

    def __init__(self) -> None:
        self._finders: list[SlotOf] = []
        self._ordinals: dict[int, dict[Hashable, int]] = {}  # by that of the owner, and by slot
        self._held: set[int] = set()

    def add_finder(self, slot_of: SlotOf) -> None:
        """Add a function that finds the slots of a framework's objects."""
        if slot_of not in self._finders:
            self._finders.append(slot_of)

    def ordinal(self, owner: Any, held: Any) -> int | None:
        """The ordinal of what an object holds in a slot; None where no op has read that slot."""
        slot = self._slot(owner, held)
        return None if slot is None else self._ordinals.get(interceptor.ordinal(owner), {}).get(slot)

    def adopt(self, owner: Any, held: Any, ordinal: int) -> tuple[int, bool]:
        """The ordinal of what was met first in the slot where an object lies; whether it will not change."""
        slot, number = self._slot(owner, held), interceptor.ordinal(owner)
        if slot is None or not number:
            return ordinal, not self._finders
        found = self._ordinals.setdefault(number, {}).setdefault(slot, ordinal)
        self._held.add(found)
        if found != ordinal:
            mortality.on_death(ordinal)
        return found, True

    def released(self, ordinal: int) -> Iterable[int]:
        """The ordinals that nothing has any more when an object that has this one is gone."""
        slots = self._ordinals.pop(ordinal, {}).values()
        self._held.difference_update(slots)
        return [*slots] if ordinal in self._held else [ordinal, *slots]

    def _slot(self, owner: Any, held: Any) -> Hashable:
        return next((found for find in self._finders if (found := find(owner, held)) is not None), None)


class Mortality:
    """The ops that die with each module instance or parameter."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self.ops: dict[int, set[int]] = {}
        self.subjects: dict[int, set[int]] = {}  # the same by op id, so that the living let go of the dead's

    def bind(self, op_id: int, subjects: Iterable[Any]) -> None:
        """Make plans under an op id die with any of the subjects."""
        ordinals = {interceptor.ordinal(subject) for subject in subjects}
        for ordinal in ordinals:
            if ordinal in self.ops:
                self.ops[ordinal].add(op_id)
            else:
                self.ops[ordinal] = {op_id}
        if ordinals:
            self.subjects[op_id] = ordinals.union(self.subjects.get(op_id, ()))

    def forget_all(self, tool: AnyTool) -> None:
        """Forget every plan that a tool has a part in."""
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.plans.clear()
                layer.rewrites.clear()
                layer.table.clear()

    def forget_ops(self, tool: AnyTool, op_ids: Iterable[int]) -> None:
        """Forget the plans of some ops that a tool has a part in, and the graphs made for its layers."""
        gone = tuple(op_ids)
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.rewrites.clear()
                for op_id in gone:
                    layer.forget(op_id)

    def on_death(self, ordinal: int) -> None:
        """Forget the plans that belonged to an object that died."""
        for one in slots.released(ordinal):
            self._forget(one)

    def _forget(self, ordinal: int) -> None:
        for op_id in self.ops.pop(ordinal, ()):
            for other in self.subjects.pop(op_id, ()):
                if other in self.ops:
                    self.ops[other].discard(op_id)
            for layer in list(self.layers):
                layer.bury(op_id)


mortality = Mortality()
slots = Slots()
bind_to_subjects = mortality.bind
"""`bind_to_subjects(op_id, subjects)`: let what is known of an op die with any of the subjects."""
forget_all = mortality.forget_all
forget_ops = mortality.forget_ops
interceptor.configure(codes.describe, mortality.on_death, slots.adopt)

"""Lifetimes of plans: a plan ends with its tool, its model or its parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.interceptor import codes

if TYPE_CHECKING:
    from amanda.plan.tool_stack import ToolStack
    from amanda.plan.tools import AnyTool

SlotOf = Callable[[Any, Any], Hashable]
"""Function of an owner and a value: name of the owner's slot that holds the value; None where none does."""


class ParameterSlots:
    """Slots of modules that hold parameters: another tensor in the same slot is the same parameter.

    So the ids of ops stay the same where a library loads a module's parameters at each call of the module.
    The ordinal of a slot is that of the first value in it.
    """

    def __init__(self) -> None:
        self._finders: list[SlotOf] = []
        self._ordinal_by_slot: dict[int, dict[Hashable, int]] = {}  # by the owner's ordinal
        self._slot_ordinals: set[int] = set()  # of all owners

    def add_finder(self, slot_of: SlotOf) -> None:
        """Add a function that finds the slots of a framework's objects."""
        if slot_of not in self._finders:
            self._finders.append(slot_of)

    def find_ordinal(self, owner: Any, value: Any) -> int | None:
        """Return the ordinal of the slot of an object that holds a value: that of the slot's first value.

        None where no slot of the object holds the value, or where no op has read the slot.
        """
        slot = self._find_slot(owner, value)
        return None if slot is None else self._ordinal_by_slot.get(interceptor.ordinal(owner), {}).get(slot)

    def record(self, owner: Any, value: Any, value_ordinal: int) -> tuple[int, bool]:
        """Record the slot that holds a value; return the slot's ordinal, and True if it is final.

        Drops the plans under the value's own ordinal, if the slot had another value first.
        value_ordinal: the value's own ordinal, returned where no slot holds the value; it is final if no
        driver has registered a finder.
        """
        slot, owner_ordinal = self._find_slot(owner, value), interceptor.ordinal(owner)
        if slot is None or not owner_ordinal:
            return value_ordinal, not self._finders
        slot_ordinal = self.record_at(owner_ordinal, slot, value_ordinal)
        # From now on ops that read the tensor have the ids of the slot's first tensor: plans under its own
        # number are never looked up again.
        if slot_ordinal != value_ordinal:
            plan_lifetimes.on_death(value_ordinal)
        return slot_ordinal, True

    def record_at(self, owner_ordinal: int, slot: Hashable, value_ordinal: int) -> int:
        """Record a slot with the value in it; return the slot's ordinal, that of the first value there."""
        slot_ordinal = self._ordinal_by_slot.setdefault(owner_ordinal, {}).setdefault(slot, value_ordinal)
        self._slot_ordinals.add(slot_ordinal)
        return slot_ordinal

    def forget_owner(self, ordinal: int) -> Iterable[int]:
        """Forget the slots of a dead object; return the ordinals that no living object has from now on.

        ordinal: that of the dead object.
        """
        slot_ordinals = self._ordinal_by_slot.pop(ordinal, {}).values()
        self._slot_ordinals.difference_update(slot_ordinals)
        # While its owner lives, a slot's first tensor may be gone and the parameter still be there.
        is_ordinal_of_slot = ordinal in self._slot_ordinals
        return [*slot_ordinals] if is_ordinal_of_slot else [ordinal, *slot_ordinals]

    def _find_slot(self, owner: Any, value: Any) -> Hashable:
        for slot_of in self._finders:
            slot = slot_of(owner, value)
            if slot is not None:
                return slot
        return None


class ParameterSlot:
    """A slot of a module for a parameter that the program hands in anew for each call.

    It is the variable of the op that reads the slot, as `context.get_variable` returns it.  A driver keeps
    the object as long as the module lives.
    identity: ordinal of the first value in the slot, and so of a parameter that lies there in other calls.

    Args:
        owner: Module with the slot.
        slot: Key of the slot, as the driver's `slot_of` returns it for a parameter there.
        value: Parameter in the slot now; slots that share it, as of tied parameters, have one identity.
    """

    def __init__(self, owner: Any, slot: Hashable, value: Any) -> None:
        owner_ordinal, value_ordinal = interceptor.ordinal(owner), interceptor.ordinal(value)
        self.identity = parameter_slots.record_at(owner_ordinal, slot, value_ordinal)


class PlanLifetimes:
    """All stacks of tools, and which ops' plans in them end with a module instance or parameter (a subject).

    op_ids_by_subject: ids of ops by the ordinal of a subject.
    subjects_by_op_id: ordinals of subjects by the id of an op.
    """

    def __init__(self) -> None:
        # Weak: stacks live with their last tool, and a plan must not outlive its tool.
        self.stacks: weakref.WeakSet[ToolStack] = weakref.WeakSet()
        self.op_ids_by_subject: dict[int, set[int]] = {}
        self.subjects_by_op_id: dict[int, set[int]] = {}

    def bind(self, op_id: int, subjects: Iterable[Any]) -> None:
        """Bind the plans of an op to subjects: the plans are dropped as soon as one subject dies."""
        # Numbers, not objects: nothing here keeps a model or a parameter alive.
        ordinals = {interceptor.ordinal(subject) for subject in subjects}
        for ordinal in ordinals:
            self.op_ids_by_subject.setdefault(ordinal, set()).add(op_id)
        if ordinals:
            self.subjects_by_op_id[op_id] = ordinals.union(self.subjects_by_op_id.get(op_id, ()))

    def forget_plans_of(self, tool: AnyTool) -> None:
        """Forget every plan of the stacks with the tool, their rewritten graphs and their tables."""
        for stack in list(self.stacks):
            if any(member is tool for member in stack.applied):
                stack.plans.clear()
                stack.rewrites.clear()
                stack.table.clear()

    def forget_plans_of_ops(self, tool: AnyTool, op_ids: Iterable[int]) -> None:
        """Forget the plans of some ops in stacks with the tool, and the graphs rewritten for these stacks."""
        dropped_ids = tuple(op_ids)
        for stack in list(self.stacks):
            if any(member is tool for member in stack.applied):
                stack.rewrites.clear()
                for op_id in dropped_ids:
                    stack.forget_plans(op_id)

    def on_death(self, ordinal: int) -> None:
        """Drop the plans bound to an object that died, and to the slots that it held."""
        for dead_ordinal in parameter_slots.forget_owner(ordinal):
            self._drop_ops_of(dead_ordinal)

    def _drop_ops_of(self, ordinal: int) -> None:
        """Drop the plans of all ops that were bound to an object."""
        for op_id in self.op_ids_by_subject.pop(ordinal, ()):
            # A parameter that outlives short-lived modules would collect the ids of their ops for ever.
            for subject_ordinal in self.subjects_by_op_id.pop(op_id, ()):
                if subject_ordinal in self.op_ids_by_subject:
                    self.op_ids_by_subject[subject_ordinal].discard(op_id)
            for stack in list(self.stacks):
                stack.drop_dead_op(op_id)


plan_lifetimes = PlanLifetimes()
parameter_slots = ParameterSlots()
bind_to_subjects = plan_lifetimes.bind
"""`bind_to_subjects(op_id, subjects)`: drop the plans of an op when one of the subjects dies."""
forget_plans_of = plan_lifetimes.forget_plans_of
forget_plans_of_ops = plan_lifetimes.forget_plans_of_ops
# The interceptor imports nothing of this room, so it is told here whom to call.
interceptor.configure(codes.describe, plan_lifetimes.on_death, parameter_slots.record)

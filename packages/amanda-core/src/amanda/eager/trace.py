"""The record that one execution of an op leaves for its backward ops."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Plan
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack


class Trace:
    """The record that an execution leaves for its backward ops; it lives as long as their graph.

    gradients: which inputs needed a gradient.
    plan: the op's plan in the scope of the execution.
    shapes: shapes of the op's inputs and outputs; None where marks have them, or no routine takes shapes.
    anew: whether backward ops are analysed in each pass, as without the cache.
    facts: facts for contexts of backward ops.
    pending: ids of backward ops whose analysis is incomplete.
    """

    __slots__ = (
        "__weakref__", "anew", "facts", "gradients", "op_id", "pending", "plan", "run", "shapes"
    )  # fmt: skip

    def __init__(
        self, op_id: int, gradients: Hashable, plan: Plan, run: dict[str, Any], anew: bool = False
    ) -> None:
        self.op_id = op_id
        self.anew = anew
        self.gradients = gradients
        self.plan = plan
        self.run = run
        self.shapes: tuple[Any, ...] | None = None
        self.facts: OpFacts | None = None
        self.pending: set[int] = set()

    @property
    def stack(self) -> ToolStack:
        """The tools of the scope of the execution."""
        return self.plan.stack

    def again(self, shapes: tuple[Any, ...] | None = None) -> Trace:
        """Return a trace for backward ops of this execution's backward ops.  shapes: those of its mark."""
        trace = copy(self)
        trace.shapes = shapes or self.shapes
        trace.pending = set()
        return trace

    def keep(self, ops: TensorOps, forward_facts: OpFacts, inputs: list[Any], outputs: list[Any]) -> None:
        """Store facts for contexts of backward ops, with the values if backward ops have to be analysed."""
        facts = forward_facts.at_backward(None, 0, True)
        if self.plan.is_complete(self.gradients):
            facts.drop_values()
        else:
            facts.inputs = [ops.storable(value) for value in inputs]
            facts.outputs = [ops.storable(value) for value in outputs]
            facts.dropped = False
        self.facts = facts

    def finish(self, again: bool = True) -> None:
        """Record that every backward op of the execution has been analysed; drop the values.

        again: whether another pass may run these ops.
        """
        if again and self.anew:
            return
        if not self.plan.is_complete(self.gradients):
            for plan in self.plan.plans_with_backward:
                plan.backward.complete.add(self.gradients)
        if self.facts is not None:
            self.facts.drop_values()

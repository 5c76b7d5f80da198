"""The record that an execution leaves for its backward ops."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Plan
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack


# Held by nodes of autodiff, so it dies with their graph; nothing else may refer to it for longer.
class Trace:
    """The record that an execution leaves for its backward ops; it lives as long as their graph.

    stack: the tools of the scope of the execution.
    shapes: shapes of the op's inputs and outputs; None where marks have them, or no routine takes shapes.
    facts: facts for contexts of backward ops; None until `store_facts`, which comes before `attach_trace`.
    values: the op's inputs and outputs, two lists; empty once no analysis is to read them.
    unanalysed_ids: ids of backward ops whose analysis is incomplete.

    Args:
        op_id: Id of the op.
        needs_grad: Key for which inputs needed a gradient, from `EagerOps.needs_grad`.
        plan: The op's plan in the scope of the execution.
        run: Dict that routines of this execution share.
        uncached: Whether backward ops are analysed in each pass, as without the cache.
    """

    __slots__ = (
        "__weakref__",
        "facts",
        "needs_grad",
        "op_id",
        "plan",
        "run",
        "shapes",
        "unanalysed_ids",
        "uncached",
        "values",
    )  # fmt: skip

    def __init__(
        self, op_id: int, needs_grad: Hashable, plan: Plan, run: dict[str, Any], uncached: bool = False
    ) -> None:
        self.op_id = op_id
        self.uncached = uncached
        self.needs_grad = needs_grad
        self.plan = plan
        self.run = run
        self.shapes: tuple[Any, ...] | None = None
        self.facts: OpFacts | None = None
        self.values: list[list[Any]] = []
        self.unanalysed_ids: set[int] = set()

    @property
    def stack(self) -> ToolStack:
        """Return the tools of the scope of the execution."""
        return self.plan.stack

    def copy_for_double_backward(self, shapes: tuple[Any, ...] | None = None) -> Trace:
        """Return a copy of the trace for backward ops of this execution's backward ops.

        Args:
            shapes: Shapes of the execution's mark; None for those of the trace.
        """
        # The copy shares plan, facts, values and `run`; each pass has its own ids of incomplete backward ops.
        trace = copy(self)
        trace.shapes = shapes or self.shapes
        trace.unanalysed_ids = set()
        return trace

    def store_facts(self, ops: TensorOps, facts: OpFacts, inputs: list[Any], outputs: list[Any]) -> None:
        """Store facts for contexts of backward ops, and the values if backward ops have to be analysed.

        Args:
            ops: Primitives of the tensors, to detach them from autodiff.
            facts: Facts of the op, from `OpFacts.for_backward_op`; executions may share them.
            inputs: Values with which the op ran.
            outputs: The op's outputs.
        """
        self.facts = facts
        if self.plan.is_backward_complete(self.needs_grad):
            facts.drop_values()
        else:
            # Detached: a trace hangs on the graph's nodes, so a tensor with its graph would never be freed.
            facts.inputs = facts.outputs = None
            self.values = [ops.detach_values(inputs), ops.detach_values(outputs)]

    def facts_for(self, op: Any, op_id: int, replaceable: bool, order: int) -> OpFacts:
        """Return facts of a backward op of this execution, with the op's values while they are stored.

        Args:
            op: Type of the backward op, whose `__name__` tools see.
            op_id: Id of the backward op, from `OpFacts.backward_id`.
            replaceable: Whether tools may replace the backward op.
            order: 1 for a backward op of the op, 2 for a backward op of that.
        """
        assert self.facts is not None
        facts = self.facts.for_backward_op(op, op_id, replaceable, order)
        if self.values:
            facts.inputs, facts.outputs = self.values
        return facts

    def drop_values(self) -> None:
        """Drop the values, and what the facts keep alive."""
        self.values.clear()
        if self.facts is not None:
            self.facts.drop_values()

    def mark_backward_analysed(self, may_run_again: bool = True) -> None:
        """Record in the plan that all backward ops of such executions are analysed; drop the values.

        Does nothing without the cache if another pass may run these ops: it analyses them once more, and
        needs the values.
        """
        if may_run_again and self.uncached:
            return
        if not self.plan.is_backward_complete(self.needs_grad):
            for plan in self.plan.plans_with_backward:
                plan.backward.analysed_for.add(self.needs_grad)
        self.drop_values()

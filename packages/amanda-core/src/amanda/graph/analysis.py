"""The analysis of the ops of a graph, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import OpAnalysis, PendingBackwardPlan
from amanda.plan.context import OpContext
from amanda.plan.lifetime import bind_to_subjects
from amanda.plan.plan import Actions, Plan

if TYPE_CHECKING:
    from amanda.graph.guards import History
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.scope.state import State


class GraphAnalysis:
    """The analysis of the ops of one graph, and of graphs that belong to it, by the tools of a state.

    plans: plans of the analysed ops, by op id.
    closed: whether the tools' scopes are closed, so that backward ops have no plans.
    history: values that traceable routines have read for earlier copies of the graph; None for no copies.
    """

    def __init__(
        self, state: State, ops: TensorOps, stack: ToolStack | None = None, history: History | None = None
    ) -> None:
        stack = stack or state.stack
        assert stack is not None
        self.state = state
        self.stack = stack
        self.ops = ops
        self.history = history
        self.plans: dict[int, Plan] = {}
        self.closed = False
        self._facts: list[OpFacts] = []

    def forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Plan:
        """Analyse a forward op; return its plan.  outputs: symbols of the op's outputs."""
        key = self.stack.key(self.ops, facts.inputs or ())
        analysis = OpAnalysis(facts, self.ops, self.stack, key, self.state.cache)
        facts.outputs = list(outputs)
        plan = analysis.after()
        if self.state.cache:
            analysis.keep()
        self.plans[facts.op_id] = plan
        self._facts.append(facts)
        return plan

    def absent(self, facts: OpFacts, outputs: Sequence[Any]) -> None:
        """Register an op that does not run itself although its backward ops do; no forward analysis runs."""
        facts.outputs = list(outputs)
        plan: Plan | None = None
        for stack in self.stack.chain:
            plan = Plan(stack, OpContext(facts, stack.analyse), plan)
        assert plan is not None
        self.plans[facts.op_id] = plan
        self._facts.append(facts)

    def backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> Actions:
        """Analyse a backward op of an analysed op; return its actions.  facts: from `OpFacts.at_backward`."""
        backward_id = facts.backward_op_id
        assert backward_id is not None
        by_plan: list[Actions] = []
        pending_plans: list[PendingBackwardPlan] = []
        plan = self.plans.get(facts.op_id)
        for scope_plan in () if plan is None or self.closed else plan.plans_with_backward:
            actions = scope_plan.backward.actions.get(backward_id)
            if actions is None:
                pending_plan = PendingBackwardPlan(facts, scope_plan, scope_plan.stack.backward_tools, False)
                pending_plan.analyse(InstrumentationPoint.BEFORE_BACKWARD_OP, facts)
                pending_plans.append(pending_plan)
                actions = pending_plan.plan
            by_plan.append(actions)
        facts.grad_inputs = list(grad_inputs)
        for pending_plan in pending_plans:
            pending_plan.analyse(InstrumentationPoint.AFTER_BACKWARD_OP, facts)
            pending_plan.keep()
        self._facts.append(facts)
        return Actions.merged(by_plan)

    def finish(self, graph: Any = None) -> None:
        """Drop every symbol from the contexts, and bind the plans to the life of the graph."""
        if graph is not None:
            for facts in self._facts:
                bind_to_subjects(facts.op_id, [graph])
        for facts in self._facts:
            facts.drop_values()
            facts.read_value, facts.variable_of, facts.read_variables = _identity, _return_none, _return_none
        self._facts.clear()

    def forget(self) -> None:
        """Drop the plans of this analysis, which an exception has left incomplete."""
        for op_id, plan in self.plans.items():
            for scope_plan in plan.chain:
                scope_plan.stack.forget(op_id)
        self.finish()


def _return_none(*_: Any) -> None:
    return None


def _identity(value: Any) -> Any:
    return value

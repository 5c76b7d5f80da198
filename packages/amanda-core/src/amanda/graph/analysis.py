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
    """The analysis of the ops of one graph, and of graphs that belong to it, by the stacks of a state.

    plans: those of the op ids that have been met.
    closed: whether the tools' scopes are closed, so that backward ops have no plans.
    history: of what traceable routines have read for earlier copies of the graph; None where there are none.
    """

    def __init__(
        self, state: State, ops: TensorOps, stack: ToolStack | None = None, history: History | None = None
    ) -> None:
        chosen = stack or state.stack
        assert chosen is not None
        self.state = state
        self.stack = chosen
        self.ops = ops
        self.history = history
        self.plans: dict[int, Plan] = {}
        self.closed = False
        self._facts: list[OpFacts] = []

    def forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Plan:
        """Bring an op whose outputs are known beforehand, as symbols."""
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
        """Bring an op that does not run itself, though backward ops of it do: no forward analysis."""
        facts.outputs = list(outputs)
        plan: Plan | None = None
        for one in self.stack.chain:
            plan = Plan(one, OpContext(facts, one.analyse), plan)
        assert plan is not None
        self.plans[facts.op_id] = plan
        self._facts.append(facts)

    def backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> Actions:
        """Bring a backward op of an op that was brought before; `facts` are those `at_backward`."""
        backward_id = facts.backward_op_id
        assert backward_id is not None
        several: list[Actions] = []
        fresh: list[PendingBackwardPlan] = []
        plan = self.plans.get(facts.op_id)
        for one in () if plan is None or self.closed else plan.plans_with_backward:
            known = one.backward.actions.get(backward_id)
            if known is None:
                draft = PendingBackwardPlan(facts, one, one.stack.backward_tools, False)
                draft.analyse(InstrumentationPoint.BEFORE_BACKWARD_OP, facts)
                fresh.append(draft)
                known = draft.plan
            several.append(known)
        facts.grad_inputs = list(grad_inputs)
        for draft in fresh:
            draft.analyse(InstrumentationPoint.AFTER_BACKWARD_OP, facts)
            draft.keep()
        self._facts.append(facts)
        return Actions.merged(several)

    def finish(self, graph: Any = None) -> None:
        """Drop every symbol that the contexts know, and make the plans die with the graph."""
        if graph is not None:
            for facts in self._facts:
                bind_to_subjects(facts.op_id, [graph])
        for facts in self._facts:
            facts.drop_values()
            facts.read_value, facts.variable_of, facts.read_variables = _itself, _nothing, _nothing
        self._facts.clear()

    def forget(self) -> None:
        """Drop the plans made so far, which an exception left incomplete."""
        for op_id, plan in self.plans.items():
            for one in plan.chain:
                one.stack.forget(op_id)
        self.finish()


def _nothing(*_: Any) -> None:
    return None


def _itself(value: Any) -> Any:
    return value

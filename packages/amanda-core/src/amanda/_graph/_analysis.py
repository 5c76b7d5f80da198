"""The analysis of the ops of a graph, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda._analysis import Analysis
from amanda._mortality import bind_to_subjects
from amanda._plan import BackwardPlan, Combined, Plan, merged
from amanda.action import InstrumentationPoint
from amanda.context import OpContext

if TYPE_CHECKING:
    from amanda._facts import OpFacts
    from amanda._layer import Layer
    from amanda._state import State
    from amanda._tensors import TensorOps


class GraphAnalysis:
    """The analysis of the ops of one graph, and of graphs that belong to it, by the layers of a state.

    plans: for each op id that has been met, the plans of the layers.
    closed: whether the tools' scopes are closed, so that backward ops have no plans.
    """

    def __init__(self, state: State, ops: TensorOps, layer: Layer | None = None) -> None:
        chosen = layer or state.layer
        assert chosen is not None
        self.state = state
        self.layer = chosen
        self.ops = ops
        self.plans: dict[int, list[tuple[Layer, Plan]]] = {}
        self.closed = False
        self._facts: list[OpFacts] = []

    def forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Combined:
        """Bring an op whose outputs are known beforehand, as symbols."""
        key = self.layer.key(self.ops, facts.inputs or ())
        analysis = Analysis(facts, self.ops, self.layer, key, self.state.cache)
        facts.outputs = list(outputs)
        combined = analysis.after()
        if self.state.cache:
            analysis.keep()
        self.plans[facts.op_id] = analysis.pairs
        self._facts.append(facts)
        return combined

    def absent(self, facts: OpFacts, outputs: Sequence[Any]) -> None:
        """Bring an op that does not run itself, though backward ops of it do: no forward analysis."""
        facts.outputs = list(outputs)
        pairs = [(one, Plan(OpContext(facts, one.analyse))) for one in self.layer.chain]
        self.plans[facts.op_id] = pairs
        self._facts.append(facts)

    def backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> BackwardPlan:
        """Bring a backward op of an op that was brought before; `facts` are those `at_backward`."""
        backward_id = facts.backward_op_id
        assert backward_id is not None
        plans: list[BackwardPlan] = []
        fresh: list[tuple[BackwardPlan, OpContext]] = []
        for layer, plan in self.plans.get(facts.op_id, ()):
            if self.closed or not layer.wants_backward:
                continue
            known = plan.backward.get(backward_id)
            if known is None:
                known = plan.backward[backward_id] = BackwardPlan()
                context = OpContext(facts, layer.analyse, plan.context)
                known.add(context.trigger_callback(InstrumentationPoint.BEFORE_BACKWARD_OP))
                fresh.append((known, context))
            plans.append(known)
        facts.grad_inputs = list(grad_inputs)
        for known, context in fresh:
            known.add(context.trigger_callback(InstrumentationPoint.AFTER_BACKWARD_OP))
        self._facts.append(facts)
        return merged(plans)

    def finish(self, graph: Any = None) -> None:
        """Let go of every symbol that the contexts know; let the plans die with the graph."""
        if graph is not None:
            for facts in self._facts:
                bind_to_subjects(facts.op_id, [graph])
        for facts in self._facts:
            facts.drop_values()
            facts.read_value, facts.variable_of, facts.read_variables = _itself, _nothing, _nothing
        self._facts.clear()

    def forget(self) -> None:
        """Drop the plans made so far, which an exception left incomplete."""
        for op_id, pairs in self.plans.items():
            for layer, _ in pairs:
                layer.forget(op_id)
        self.finish()


def _nothing(*_: Any) -> None:
    return None


def _itself(value: Any) -> Any:
    return value

"""The analysis of an op that tools meet for the first time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from amanda._plan import Combined, Plan
from amanda.action import InstrumentationPoint
from amanda.context import OpContext

if TYPE_CHECKING:
    from amanda._facts import OpFacts
    from amanda._layer import Layer
    from amanda._tensors import TensorOps


class Analysis:
    """What the tools of a layer, and of those around it, record at an op, before it and after.

    pairs: each layer with its plan.
    fresh: the layers whose plan is made now, the key that it is found by later, and the plan.
    """

    __slots__ = ("facts", "fresh", "pairs")

    def __init__(self, facts: OpFacts, ops: TensorOps, layer: Layer, key: Hashable, cache: bool) -> None:
        self.facts = facts
        self.pairs: list[tuple[Layer, Plan]] = []
        self.fresh: list[tuple[Layer, Hashable, Plan]] = []
        inherited: OpContext | None = None
        for one in layer.chain:
            own = key if one is layer else one.key(ops, facts.inputs or ())
            plan = one.plans.get(facts.op_id, {}).get(own) if cache else None
            if plan is None:
                context = OpContext(facts, one.analyse, inherited)
                plan = Plan(context)
                plan.add(context.trigger_callback(InstrumentationPoint.BEFORE_FORWARD_OP))
                self.fresh.append((one, own, plan))
            inherited = plan.context
            self.pairs.append((one, plan))

    def after(self) -> Combined:
        """Run the analyses after the op, whose outputs the facts have; all that was recorded."""
        for _, _, plan in self.fresh:
            plan.add(plan.context.trigger_callback(InstrumentationPoint.AFTER_FORWARD_OP))
        return Combined(self.pairs)

    def keep(self) -> None:
        """Let the plans be found when the op is met again."""
        for layer, key, plan in self.fresh:
            layer.plans.setdefault(self.facts.op_id, {})[key] = plan

"""Layers: the tools of scopes within each other, with the plans that they have made."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import AnalysisPart, Drafts
from amanda.plan.hooks import hooks
from amanda.plan.lifetime import mortality
from amanda.plan.notes import add_note, describe
from amanda.plan.order import routines_at, same

if TYPE_CHECKING:
    from amanda.plan.context import OpContext
    from amanda.plan.plan import Plan
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tools import Analysis, AnyTool

LAYERS_PER_TOOL = 16
PLANS_PER_OP = 256


class Layer:
    """The tools of one scope, in order, above the layers of the scopes around it.

    by_extents, by_callables: whether the guards ask for shapes, and more than that, of what an op is given.
    by_reads: whether shapes decide where analysis routines ask for them.
    sized: ids of the ops where they have.
    writers: ids of the ops that write into tensors that they are given.
    intercepts: whether any tool asks for that.
    backward_tools: those whose routines for backward ops run in this layer.
    twice: whether gradients have been differentiated in turn, so that backward ops have backward ops.
    drafts: the plans that threads make at this moment.
    rewrites: what a driver keeps of graphs rewritten for this layer, by the graph.
    """

    def __init__(self, tools: Sequence[AnyTool], parent: Layer | None) -> None:
        self.tools = tuple(tools)
        self.chain: tuple[Layer, ...] = (*(parent.chain if parent else ()), self)
        applied = [tool for layer in self.chain for tool in layer.tools]
        self.applied = tuple(applied)
        self._versions = [tool._amanda.version for tool in applied]
        self.routines = {
            point: routines_at(point, (*self._joining(point), *self.tools), applied)
            for point in InstrumentationPoint
        }
        self.guards: list[Analysis] = [*(parent.guards if parent else ())]
        for routines in self.routines.values():
            self.guards += [one for one in routines if one.guard is not None]
        self.by_extents = any(one.guard == "shape" for one in self.guards)
        self.by_reads = any(one.guard == "read" for one in self.guards)
        self.sized: set[int] = set()
        self.by_callables = any(callable(one.guard) for one in self.guards)
        self.intercepts = any(tool.intercepts for tool in applied)
        backward = [one.tool for point in self.routines if point.is_backward for one in self.routines[point]]
        self.backward_tools = tuple(tool for tool in applied if any(tool is one for one in backward))
        self.wants_backward = bool(self.backward_tools)
        self.twice = False
        self.plans: dict[int, dict[Hashable, Plan]] = {}
        self.drafts = Drafts()
        self.writers: set[int] = set()
        self.table = interceptor.PlanTable()
        self.rewrites: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        mortality.layers.add(self)

    @property
    def is_current(self) -> bool:
        """Return True unless routines or restrictions of a tool have changed since the layer was made."""
        return self._versions == [tool._amanda.version for tool in self.applied]

    def _joining(self, point: InstrumentationPoint) -> list[AnyTool]:
        """Return the tools of layers around that may take part at a point for tools of this layer alone."""
        around = self.chain[:-1]
        seen = [one.tool for layer in around for one in layer.routines[point]]
        return [tool for layer in around for tool in layer.tools if not any(tool is one for one in seen)]

    def analyse(
        self, context: OpContext, point: InstrumentationPoint, part: AnalysisPart | None = None
    ) -> None:
        """Run this layer's analysis routines of a point on a context.

        part: the tools whose routines run, and what keeps their actions apart; None for all tools.
        """
        for i, routine in enumerate(self.routines[point]):
            tool = routine.tool
            if part is not None and not any(tool is one for one in part.tools):
                continue
            context._tool, first = tool, len(context._actions)
            registry = tool._amanda
            try:
                with registry.lock:
                    while registry.gone:
                        tool.op_gone(registry.gone.popleft())
                    registry.analysed.add(context._facts.op_id)
                    if not registry.admissions or all(admits(context) for admits in registry.admissions):
                        routine.callback(context)
            except BaseException as error:
                add_note(error, describe(context._facts, tool, point.value))
                raise
            if part is not None:
                part.recorded[point, i] = tuple(context._actions[first:])
        hooks.tell("amanda_op_analysed", context=context)

    def has(self, tool: AnyTool) -> bool:
        """Return True if a tool, or one that stands for it, is applied in this layer or in one around."""
        return any(one is tool for one in self.applied) or any(same(one, tool) for one in self.applied)

    def is_sized(self, op_id: int | None) -> bool:
        """Return True if the shapes of an op's inputs decide its plan; None for any op of a graph."""
        if self.by_extents or not self.by_reads:
            return self.by_extents
        return op_id is None or any(op_id in layer.sized for layer in self.chain)

    def key(self, ops: TensorOps, inputs: Sequence[Any], op_id: int | None = None) -> Hashable:
        """Return the key of a plan: the signature of the op's inputs, and what the guards answer.

        op_id: that of an op which runs as it is called.
        """
        if not self.guards:
            return ops.signature(inputs)
        answers: list[Hashable] = [ops.signature(inputs)]
        for tool, _, _, guard, _ in self.guards if self.by_callables else ():
            if callable(guard):
                try:
                    answers.append(guard(list(inputs)))
                except BaseException as error:
                    add_note(error, f"[amanda] tool {type(tool).__name__}, guard {guard}")
                    raise
        return (*answers, ops.shapes(inputs)) if self.is_sized(op_id) else tuple(answers)

    def keep(self, op_id: int, key: Hashable, plan: Plan, read: Hashable = None) -> None:
        """Keep a plan under its key; where there are many, the one made first goes.

        read: the shapes that its analysis has read, if it is the first at the op that has read any.
        """
        if read is not None:
            self.forget(op_id)  # what is there for other dtypes is found by shape from now on
            self.sized.add(op_id)
            assert isinstance(key, tuple)
            key = (*key, read)
        plans = self.plans.setdefault(op_id, {})
        plans[key] = plan
        if len(plans) > PLANS_PER_OP:
            del plans[next(iter(plans))]

    def differentiate_twice(self) -> bool:
        """Note that backward ops will have backward ops; return True if that was not reckoned with before."""
        if self.twice:
            return False
        settled = False
        for layer in self.chain:
            layer.twice = True
            plans = [plan for plans in layer.plans.values() for plan in plans.values() if plan.watches]
            for plan in plans:
                settled = settled or bool(plan.backward.complete)
                plan.backward.reopen()
        if settled:
            self.table.clear()
        return settled

    def relearn(self, op_id: int) -> None:
        """Forget what native code has learned of an op, at which more is left to do."""
        known = self.table.get(op_id)
        if isinstance(known, interceptor.Memo):
            known.forget()

    def watch_writes(self) -> None:
        """Bring ops that write to Python from now on, also those that native code has learned."""
        for op_id in self.writers:
            if self.table.get(op_id) is None:
                self.table.discard(op_id)
            else:
                self.relearn(op_id)

    def forget(self, op_id: int) -> None:
        """Drop every plan of an op."""
        self.plans.pop(op_id, None)
        self.writers.discard(op_id)
        self.sized.discard(op_id)
        self.table.discard(op_id)

    def bury(self, op_id: int) -> None:
        """Drop every plan of an op that is gone for good, and tell the tools."""
        self.forget(op_id)
        for tool in self.applied:
            tool._amanda.on_death(op_id)


def layer_of(tools: Sequence[AnyTool], parent: Layer | None) -> Layer:
    """The layer of these tools above `parent`, with the plans of earlier scopes like it.

    It lives with the tool that comes last, which is the one that depends on the others.
    """
    chain = parent.chain if parent else ()
    key = tuple(
        tuple((tool._amanda.number, tool._amanda.version) for tool in group)
        for group in (*(layer.tools for layer in chain), tuple(tools))
    )
    layers = tools[-1]._amanda.layers if tools else {}
    if key not in layers:
        layers[key] = Layer(tools, parent)
    layer: Layer = layers[key]
    if tools:
        tools[-1]._amanda.layers.move_to_end(key)
        while len(layers) > LAYERS_PER_TOOL:
            tools[-1]._amanda.layers.popitem(last=False)
    return layer

"""The analysis of an op that tools meet for the first time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import ref

from amanda import interceptor
from amanda.plan.action import Action, InstrumentationPoint
from amanda.plan.context import OpContext
from amanda.plan.plan import DELETED, Actions, Changes, Plan, Recorded

if TYPE_CHECKING:
    from amanda.plan.facts import OpFacts
    from amanda.plan.layer import Layer
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tools import AnyTool

P = TypeVar("P", bound="Actions | Plan")


class Draft(Generic[P]):
    """A plan that is being made: each point of the op is analysed once, by whichever thread comes first."""

    __slots__ = ("__weakref__", "_done", "_lock", "_source", "context", "plan")

    def __init__(self, plan: P, context: OpContext, source: Plan) -> None:
        """source: the plan of the layer."""
        self.plan = plan
        self.context = context
        self._source = source
        self._lock = interceptor.Lock()
        self._done: set[InstrumentationPoint] = set()

    def analyse(self, point: InstrumentationPoint, facts: OpFacts) -> None:
        """Run the analyses of a point on an execution that is there; they see its values alone."""
        with self._lock:
            if point not in self._done:
                self.context._facts = facts
                self._add(self._triggered(point))
                self._done.add(point)

    def _triggered(self, point: InstrumentationPoint) -> Sequence[Action]:
        """Run the analyses on what those of the scopes around have written; note what they write."""
        context, source = self.context, self._source
        is_first = point is InstrumentationPoint.BEFORE_FORWARD_OP  # contexts begin as copies there
        if is_first or not (source.around or source.layer.routines[point]):
            return context.trigger_callback(point)
        key = context.get_backward_op_id(), point
        begun = given = dict(context)
        if source.around:
            for one in source.around:
                _take_over(context, one.written.get(key, {}))
            given = dict(context)
        recorded = context.trigger_callback(point)
        changes = _changes(given, context)
        if changes:
            source.written[key] = {**source.written.get(key, {}), **changes}
        if point is InstrumentationPoint.AFTER_FORWARD_OP:
            source.undone = _changes(context, begun)
        return recorded

    def _add(self, recorded: Sequence[Action]) -> None:
        if recorded:
            own = self.plan.own if isinstance(self.plan, Plan) else self.plan
            own.add(recorded)


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Changes:
    """Return what leads from one state of a context to another."""
    changes = {key: value for key, value in second.items() if first.get(key, DELETED) is not value}
    changes.update(dict.fromkeys(first.keys() - second.keys(), DELETED))
    return changes


def _take_over(context: OpContext, changes: Changes) -> None:
    """Change a context as another was changed."""
    for key, value in changes.items():
        if value is DELETED:
            context.pop(key, None)
        else:
            context[key] = value


class AnalysisPart(NamedTuple):
    """Some tools of a layer, and what their analysis routines have recorded."""

    tools: Sequence[AnyTool]
    recorded: Recorded


class BackwardDraft(Draft[Actions]):
    """Actions at a backward op that some tools analyse, and those of tools that have analysed it before."""

    __slots__ = ("_recorded",)
    _keeping = interceptor.Lock()

    def __init__(self, facts: OpFacts, source: Plan, tools: Sequence[AnyTool], anew: bool) -> None:
        """anew: whether no earlier analysis counts."""
        layer = source.layer
        self._recorded: Recorded | None = None  # all tools together need not be told apart
        if len(tools) == len(layer.backward_tools):
            super().__init__(Actions(), OpContext(facts, layer.analyse, source.context), source)
            return
        earlier = {} if anew else source.backward.partial.get(facts.backward_op_id or 0, {}).copy()
        self._recorded = {
            (point, i): actions
            for (point, i), actions in earlier.items()
            if not any(layer.routines[point][i].tool is one for one in tools)
        }
        analyse = partial(layer.analyse, part=AnalysisPart(tools, self._recorded))
        super().__init__(Actions(), OpContext(facts, analyse, source.context), source)
        self.context._actions += Actions.of(self._recorded).all  # a second replacement is an error

    def _add(self, recorded: Sequence[Action]) -> None:
        if self._recorded is None:
            super()._add(recorded)
            return
        whole = Actions.of(self._recorded)
        self.plan.before, self.plan.replace, self.plan.after = whole.before, whole.replace, whole.after

    def keep(self) -> None:
        """Keep the actions for later passes, with those that other threads have kept meanwhile."""
        id, record, layer = self.context.get_backward_op_id(), self._source.backward, self._source.layer
        assert id is not None
        with self._keeping:
            if self._recorded is None:
                record.actions[id] = self.plan
                record.partial.pop(id, None)
                return
            if id in record.actions and id not in record.partial:
                return  # another thread, or pass, had all tools
            kept = record.partial.setdefault(id, {})
            kept.update(self._recorded)
            record.actions[id] = Actions.of(kept)
            if len(kept) == sum(len(layer.routines[point]) for point in layer.routines if point.is_backward):
                del record.partial[id]


class Drafts:
    """The drafts of threads that execute an op for the first time; each lives as long as one of them."""

    __slots__ = ("_drafts", "_lock")

    def __init__(self) -> None:
        self._lock = interceptor.Lock()
        self._drafts: dict[Hashable, ref[Draft[Any]]] = {}

    def share(
        self, key: Hashable, known: Callable[[], P | None], make: Callable[[], Draft[P]]
    ) -> Draft[P] | P:
        """Return the plan once it is known, else the draft that another thread has begun, else a new one.

        A thread makes its plan known before it lets go of the draft.
        """
        with self._lock:
            drafts = self._drafts
            reference = drafts.get(key)
            begun = None if reference is None else reference()
            if begun is not None:
                return begun
            plan = known()
            if plan is not None:
                return plan
            draft = make()

            def forget(reference: ref[Draft[P]]) -> None:
                if drafts.get(key) is reference:
                    del drafts[key]

            drafts[key] = ref(draft, forget)
            return draft


class Analysis:
    """The actions that the tools of a layer, and of those around it, record before and after an op.

    plan: that of the layer.
    fresh: drafts of the plans that are made now, with the key that each is found by later.
    """

    __slots__ = ("_reading", "facts", "fresh", "plan")

    def __init__(self, facts: OpFacts, ops: TensorOps, layer: Layer, key: Hashable, cache: bool) -> None:
        self.facts = facts
        self._reading = ops.reading
        self.fresh: list[tuple[Hashable, Draft[Plan]]] = []
        plan: Plan | None = None
        called = facts.op_id if facts.namespace[-1] == "eager" else None
        for one in layer.chain:
            own = key if one is layer else one.key(ops, facts.inputs or (), called)
            plan = self._plan(one, own, plan, cache)
        assert plan is not None
        self.plan = plan
        plan.lay_out()

    def _plan(self, layer: Layer, key: Hashable, outer: Plan | None, cache: bool) -> Plan:
        """Return a layer's plan: the one it has, or one of which all is recorded that comes before the op."""
        op_id = self.facts.op_id

        def begin() -> Draft[Plan]:
            context = OpContext(self.facts, layer.analyse, None if outer is None else outer.context)
            if outer is not None:
                _take_over(context, outer.undone)
            plan = Plan(layer, context, outer)
            return Draft(plan, context, plan)

        draft: Draft[Plan] | Plan
        if cache:
            shared = (op_id, key, self.facts.input_shapes) if layer.by_reads else (op_id, key)
            draft = layer.drafts.share(shared, lambda: layer.plans.get(op_id, {}).get(key), begin)
        else:
            draft = begin()
        if isinstance(draft, Plan):
            return draft
        with self._reading():
            draft.analyse(InstrumentationPoint.BEFORE_FORWARD_OP, self.facts)
        self.fresh.append((key, draft))
        return draft.plan

    def after(self) -> Plan:
        """Run the analyses after the op, whose outputs the facts have; return all that was recorded."""
        with self._reading():
            for _, draft in self.fresh:
                draft.analyse(InstrumentationPoint.AFTER_FORWARD_OP, self.facts)
        self.plan.lay_out()
        return self.plan

    def keep(self) -> None:
        """Keep the plans for when the op is met again."""
        op_id, read = self.facts.op_id, self.facts.input_shapes if self.facts.reads_shapes else None
        layers = [draft.plan.layer for _, draft in self.fresh]
        apart = [layer.is_sized(op_id) or not layer.by_reads for layer in layers]
        for (key, draft), layer, known in zip(self.fresh, layers, apart, strict=True):
            layer.keep(op_id, key, draft.plan, None if known else read)

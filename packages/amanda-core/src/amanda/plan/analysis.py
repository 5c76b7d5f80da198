"""The analysis of an op: the tools' analysis routines run at its first execution, once for all threads."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import ref

from amanda import interceptor
from amanda.plan.action import Action, InstrumentationPoint
from amanda.plan.context import OpContext
from amanda.plan.plan import DELETED, Actions, ContextChanges, Plan, RecordedActions

if TYPE_CHECKING:
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.plan.tools import AnyTool

PlanT = TypeVar("PlanT", bound="Actions | Plan")


class PendingPlan(Generic[PlanT]):
    """A plan whose op is under analysis: whichever thread comes first analyses each point of the op, once.

    plan: the plan to complete, or the actions at a backward op.  context: what the analysis routines see.
    """

    # `PendingPlans` holds it weakly, which slots do not allow by themselves.
    __slots__ = ("__weakref__", "_analysed_points", "_lock", "_stack_plan", "context", "plan")

    def __init__(self, plan: PlanT, context: OpContext, stack_plan: Plan) -> None:
        """stack_plan: the stack's plan of the forward op; `plan` itself, if that is to be completed."""
        self.plan = plan
        self.context = context
        self._stack_plan = stack_plan
        self._lock = interceptor.Lock()
        self._analysed_points: set[InstrumentationPoint] = set()

    def analyse(self, point: InstrumentationPoint, facts: OpFacts) -> None:
        """Run the analysis routines of a point on this thread's execution, unless another thread has.

        Adds the actions that the routines record to the plan.
        """
        with self._lock:
            if point not in self._analysed_points:
                # The thread that analyses shows its own execution's values, not those of the thread that came
                # first.
                self.context._facts = facts
                self._update_plan(self._run_analyses(point))
                self._analysed_points.add(point)

    def _run_analyses(self, point: InstrumentationPoint) -> Sequence[Action]:
        """Run the analysis routines of a point; return the actions that they recorded.

        After the op and at backward ops they run on the context that the scopes around have left.  Their
        changes of the context are recorded in the stack's plan, for the scopes within.
        """
        context, stack_plan = self.context, self._stack_plan
        # Before the forward op, the context was just copied from that of the scope around.
        is_first = point is InstrumentationPoint.BEFORE_FORWARD_OP
        if is_first or not (stack_plan.outer_plans or stack_plan.stack.routines[point]):
            return context.trigger_callback(point)
        point_key = context.get_backward_op_id(), point
        # Copies, since an analysis may write any key of the context at any time.
        initial_context = context_before = dict(context)
        # A tool of this scope sees what a dependency in a scope around wrote at the same point, also where
        # that plan was made in an earlier execution.
        if stack_plan.outer_plans:
            for outer_plan in stack_plan.outer_plans:
                _apply_changes(context, outer_plan.context_changes.get(point_key, {}))
            context_before = dict(context)
        recorded_actions = context.trigger_callback(point)
        changes = _context_changes(context_before, context)
        if changes:
            earlier_changes = stack_plan.context_changes.get(point_key, {})
            stack_plan.context_changes[point_key] = {**earlier_changes, **changes}
        # A scope within starts before the op, so it needs the context without what came after the op.
        if point is InstrumentationPoint.AFTER_FORWARD_OP:
            if context_before is initial_context:  # no scope around: half the look-ups
                undone = {key: initial_context.get(key, DELETED) for key in changes}
            else:
                undone = _context_changes(context, initial_context)
            stack_plan.changes_to_undo = undone
        return recorded_actions

    def _update_plan(self, recorded: Sequence[Action]) -> None:
        """Add actions to those of the stack's own tools."""
        if recorded:
            scope_actions = self.plan.scope_actions if isinstance(self.plan, Plan) else self.plan
            scope_actions.add(recorded)


def _context_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> ContextChanges:
    """Return the changes that lead from one state of a context to another.

    Keys that only the state before has are `DELETED`.
    """
    # Compared by identity: equality of tensors has no truth value, and computing it would run ops.
    if len(before) <= len(after) and all(map(operator.is_, before, after)):
        # The usual case: no key was deleted, so that new ones follow the others.  No look-up, no bytecode.
        old_values = chain(before.values(), repeat(DELETED))
        return dict(compress(after.items(), map(operator.is_not, after.values(), old_values)))
    changes = {key: value for key, value in after.items() if before.get(key, DELETED) is not value}
    changes.update(dict.fromkeys(before.keys() - after.keys(), DELETED))
    return changes


def _apply_changes(context: OpContext, changes: ContextChanges) -> None:
    """Apply the changes of another context to a context."""
    for key, value in changes.items():
        if value is DELETED:
            context.pop(key, None)
        else:
            context[key] = value


class AnalysisPart(NamedTuple):
    """Some tools of a stack, and the actions that their analysis routines have recorded."""

    tools: Sequence[AnyTool]
    recorded: RecordedActions


class PendingBackwardPlan(PendingPlan[Actions]):
    """The actions at a backward op under analysis by some tools, with those of tools before them."""

    __slots__ = ("_records",)
    # One lock for all: backward ops are analysed once, so threads hardly ever meet here.
    _record_lock = interceptor.Lock()

    def __init__(
        self, facts: OpFacts, stack_plan: Plan, tools: Sequence[AnyTool], ignore_earlier: bool
    ) -> None:
        """tools: those that analyse the op now.  ignore_earlier: whether no earlier analysis counts."""
        stack = stack_plan.stack
        # Actions by routine, of these tools and earlier ones; None: all tools analyse the op together.
        self._records: RecordedActions | None = None
        if len(tools) == len(stack.backward_tools):
            super().__init__(Actions(), OpContext(facts, stack.analyse, stack_plan.context), stack_plan)
            return
        stored_records = stack_plan.backward.partial_records.get(facts.backward_op_id or 0, {})
        earlier_records = {} if ignore_earlier else stored_records.copy()
        # Tools that analyse the op once more replace what they recorded before.
        self._records = {
            (point, i): actions
            for (point, i), actions in earlier_records.items()
            if not any(stack.routines[point][i].tool is tool for tool in tools)
        }
        analyse = partial(stack.analyse, part=AnalysisPart(tools, self._records))
        super().__init__(Actions(), OpContext(facts, analyse, stack_plan.context), stack_plan)
        self.context._actions += Actions.from_records(self._records).all  # a second replacement is an error

    def _update_plan(self, recorded: Sequence[Action]) -> None:
        """Set the plan's actions from the records of all tools; add them where all tools analyse together."""
        if self._records is None:
            super()._update_plan(recorded)
            return
        # Sorted anew from all records: a tool that analyses later may come before others in the order of
        # tools.
        actions = Actions.from_records(self._records)
        self.plan.before, self.plan.replace, self.plan.after = actions.before, actions.replace, actions.after

    def store(self) -> None:
        """Store the actions for later passes, merged with actions that other threads have stored.

        Does nothing if another thread has stored the actions of all tools.
        """
        backward_id, stack = self.context.get_backward_op_id(), self._stack_plan.stack
        backward = self._stack_plan.backward
        assert backward_id is not None
        with self._record_lock:
            if self._records is None:
                backward.actions[backward_id] = self.plan
                backward.partial_records.pop(backward_id, None)
                return
            if self._stack_plan.is_backward_analysed(backward_id):
                return  # another thread, or pass, had all tools
            all_records = backward.partial_records.setdefault(backward_id, {})
            all_records.update(self._records)
            backward.actions[backward_id] = Actions.from_records(all_records)
            routine_count = sum(len(stack.routines[point]) for point in stack.routines if point.is_backward)
            if len(all_records) == routine_count:
                # Every tool has analysed the op, so nobody asks any more which tool recorded what.
                del backward.partial_records[backward_id]


class PendingPlans:
    """Pending plans that threads share; each lives as long as a thread that executes its op first.

    lock: held by a thread that looks for a pending plan, then for the finished one, and adds a new one if
    there is neither.  A thread stores its finished plan before it drops the pending plan.
    """

    __slots__ = ("_references", "lock")

    def __init__(self) -> None:
        self.lock = interceptor.Lock()
        self._references: dict[Hashable, ref[PendingPlan[Any]]] = {}

    def find(self, key: Hashable) -> PendingPlan[Any] | None:
        """Return the pending plan of another thread, if there is one.

        Args:
            key: Identity of the op and the analysis.
        """
        reference = self._references.get(key)
        return None if reference is None else reference()

    def add(self, key: Hashable, pending: PendingPlan[PlanT]) -> PendingPlan[PlanT]:
        """Add a pending plan, and return it; it is held weakly.

        Args:
            key: Identity of the op and the analysis.
            pending: The pending plan.
        """
        self._references[key] = ref(pending, partial(_forget_reference, self._references, key))
        return pending


def _forget_reference(
    reference_by_key: dict[Hashable, ref[PendingPlan[Any]]], key: Hashable, dead_reference: ref[Any]
) -> None:
    # A new pending plan may have taken the key before the old reference's callback ran.
    if reference_by_key.get(key) is dead_reference:
        del reference_by_key[key]


class OpAnalysis:
    """The analysis of one op by the tools of a stack and of the stacks around it.

    plan: the plan of the stack.
    pending: the pending plans of this analysis, each with the key under which it will be stored.
    """

    __slots__ = ("_reading", "facts", "pending", "plan")

    def __init__(self, facts: OpFacts, ops: TensorOps, stack: ToolStack, key: Hashable, cache: bool) -> None:
        """key: the key of the plan in `stack`.  cache: whether plans are stored, and shared by threads."""
        self.facts = facts
        self._reading = ops.without_overrides
        self.pending: list[tuple[Hashable, PendingPlan[Plan]]] = []
        plan: Plan | None = None
        # Whether shapes are a part of a key is decided for each op where calls are eager, and for all ops
        # together in a graph.
        eager_id = facts.op_id if facts.namespace[-1] == "eager" else None
        for chain_stack in stack.chain:  # the outermost first: the plan of each is the outer one of the next
            if chain_stack is not stack:
                chain_key = chain_stack.plan_key(ops, facts.inputs or (), eager_id)
            else:
                chain_key = key
            plan = self._find_or_analyse(chain_stack, chain_key, plan, cache)
        assert plan is not None
        self.plan = plan
        plan.merge_actions()

    def _find_or_analyse(self, stack: ToolStack, key: Hashable, outer: Plan | None, cache: bool) -> Plan:
        """Return a stack's stored plan; else run the analyses before the op, and return a plan to complete.

        A plan to complete is in `pending`, for `analyse_after_op`.  outer: the plan of the stack around.
        """
        op_id = self.facts.op_id
        if cache:
            # Two threads may meet at an op with different shapes: where shapes may yet become a part of the
            # key, each has an analysis of its own.
            pending_key = (
                (op_id, key, self.facts.input_shapes) if stack.keyed_by_shapes_read else (op_id, key)
            )
            with stack.pending_plans.lock:
                pending = stack.pending_plans.find(pending_key)
                if pending is None:
                    stored_plan = stack.plans.get(op_id, {}).get(key)
                    if stored_plan is not None:  # another thread has finished the analysis
                        return stored_plan
                    pending = stack.pending_plans.add(pending_key, self._new_pending_plan(stack, outer))
        else:
            pending = self._new_pending_plan(stack, outer)
        with self._reading():
            pending.analyse(InstrumentationPoint.BEFORE_FORWARD_OP, self.facts)
        self.pending.append((key, pending))
        return pending.plan

    def _new_pending_plan(self, stack: ToolStack, outer: Plan | None) -> PendingPlan[Plan]:
        """Return an empty plan to complete, with a context that starts from that of the plan around."""
        context = OpContext(self.facts, stack.analyse, None if outer is None else outer.context)
        if outer is not None:
            # The context of the scope around has what was written after the op; here the op has not run yet.
            _apply_changes(context, outer.changes_to_undo)
        plan = Plan(stack, context, outer)
        return PendingPlan(plan, context, stack_plan=plan)

    def analyse_after_op(self) -> Plan:
        """Run the analyses after the op, whose outputs are in the facts; return the complete plan."""
        with self._reading():
            for _, pending in self.pending:
                pending.analyse(InstrumentationPoint.AFTER_FORWARD_OP, self.facts)
        self.plan.merge_actions()
        return self.plan

    def store_plans(self) -> None:
        """Store the plans for later executions of the op.

        If this analysis is the first of the op that has read shapes, they become a part of the keys.
        """
        op_id, shapes_read = self.facts.op_id, self.facts.input_shapes if self.facts.reads_shapes else None
        stacks = [pending.plan.stack for _, pending in self.pending]
        # Asked for all stacks first: to store a plan in one stack changes the answer for the stacks within.
        lack_shapes = [stack.keyed_by_shapes_read and not stack.depends_on_shapes(op_id) for stack in stacks]
        for (key, pending), stack, lacks_shapes in zip(self.pending, stacks, lack_shapes, strict=True):
            stack.store_plan(op_id, key, pending.plan, shapes_read if lacks_shapes else None)

"""Stacks of the tools of nested scopes, with the plans that the tools' analyses made for each op."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import AnalysisPart, PendingPlans
from amanda.plan.facts import add_note, error_note
from amanda.plan.lifetime import plan_lifetimes
from amanda.plan.tools import hooks, interchangeable, routines_at

if TYPE_CHECKING:
    from amanda.plan.context import OpContext
    from amanda.plan.plan import Plan
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tools import AnyTool, RegisteredRoutine

# A tool that is applied with ever new partners would otherwise keep the plans of all of them.
STACKS_PER_TOOL = 16
# A guard may have any number of answers, such as the lengths of sentences.
PLANS_PER_OP = 256


class ToolStack:
    """The tools of one scope, in order, above the stacks of the scopes around it; with the plans of ops.

    chain: the stacks of the scopes around, the outermost first, and this one.  applied: the tools of all.
    routines: analysis routines by point, in running order.  guards: routines of the chain with a guard.
    table: entries by which native code finds the plans of an op.

    keyed_by_shapes: whether a guard makes the shapes of the inputs a part of the key of every plan.
    keyed_by_shapes_read: whether shapes are a part of the key where an analysis routine has read shapes.
    keyed_by_callables: whether a guard is a function of the inputs.
    shape_dependent_ops: ids of the ops whose analysis has read shapes.
    writing_ops: ids of the ops that write into their input tensors.
    intercepts: whether a tool needs calls to be intercepted.
    backward_tools: the tools whose analysis routines for backward ops run in this stack.
    double_backward: whether gradients have been differentiated, so that backward ops have backward ops.
    plans: plans of each op, by the op's id and the key of `plan_key`.
    pending_plans: plans that threads are making at this moment.
    passes: what a driver has learned of backward passes, as long as the plans stay the same.
    rewrites: a driver's records of graphs rewritten for this stack, by graph.
    """

    def __init__(self, tools: Sequence[AnyTool], parent: ToolStack | None) -> None:
        self.tools = tuple(tools)
        self.chain: tuple[ToolStack, ...] = (*(parent.chain if parent else ()), self)
        applied = [tool for stack in self.chain for tool in stack.tools]
        self.applied = tuple(applied)
        # Compared later: a tool whose routines have changed since needs another stack.
        self._versions = [tool._amanda.version for tool in applied]
        self.routines = {
            point: routines_at(point, (*self._inactive_outer_tools(point), *self.tools), applied)
            for point in InstrumentationPoint
        }
        self.guards: list[RegisteredRoutine] = [*(parent.guards if parent else ())]
        for routines in self.routines.values():
            self.guards += [routine for routine in routines if routine.guard is not None]
        self.keyed_by_shapes = any(routine.guard == "shape" for routine in self.guards)
        self.keyed_by_shapes_read = any(routine.guard == "read" for routine in self.guards)
        self.shape_dependent_ops: set[int] = set()
        self.keyed_by_callables = any(callable(routine.guard) for routine in self.guards)
        self.intercepts = any(tool.intercepts for tool in applied)
        backward_points = [point for point in self.routines if point.is_backward]
        backward_tool_ids = {
            id(routine.tool) for point in backward_points for routine in self.routines[point]
        }
        self.backward_tools = tuple(tool for tool in applied if id(tool) in backward_tool_ids)
        self.wants_backward = bool(self.backward_tools)
        self.double_backward = False
        self.plans: dict[int, dict[Hashable, Plan]] = {}
        self.pending_plans = PendingPlans()
        self.passes: dict[Hashable, Any] = {}
        self.writing_ops: set[int] = set()
        self.table = interceptor.PlanTable()
        self.rewrites: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        plan_lifetimes.stacks.add(self)

    @property
    def is_current(self) -> bool:
        """Return True unless a tool's routines or restrictions have changed since the stack was created."""
        return self._versions == [tool._amanda.version for tool in self.applied]

    def _inactive_outer_tools(self, point: InstrumentationPoint) -> list[AnyTool]:
        """Return the tools of stacks around whose routines do not run at a point for any tool there.

        They may run in this stack, for a tool of this stack that depends on them.
        """
        outer_stacks = self.chain[:-1]
        active_ids = {id(routine.tool) for stack in outer_stacks for routine in stack.routines[point]}
        return [tool for stack in outer_stacks for tool in stack.tools if id(tool) not in active_ids]

    def analyse(
        self, context: OpContext, point: InstrumentationPoint, part: AnalysisPart | None = None
    ) -> None:
        """Run this stack's analysis routines of a point on a context; call the hook for an analysed op.

        Before each routine its tool's `op_gone` is called for ops that have died.  A routine whose tool has
        restrictions that do not admit the op is left out.  An exception passes, with a note that names the
        tool and the op.
        part: the tools whose routines run; gets each routine's actions.  None for all tools.
        """
        for i, routine in enumerate(self.routines[point]):
            tool = routine.tool
            if part is not None and not any(tool is member for member in part.tools):
                continue
            context._tool, tool_state = tool, tool._amanda
            earlier_action_count = 0 if part is None else len(context._actions)
            try:
                with tool_state.lock:
                    # Here and not when the op died: an object may die at any line, also under the tool's
                    # lock.
                    while tool_state.dead_ops:
                        tool.op_gone(tool_state.dead_ops.popleft())
                    tool_state.analysed_ops.add(context._facts.op_id)
                    admissions = tool_state.admissions
                    # Most tools have none, and a generator takes as long as a short routine.
                    if not admissions or all(admits(context) for admits in admissions):
                        routine.callback(context)
            except BaseException as error:
                add_note(error, error_note(context._facts, tool, point.value))
                raise
            if part is not None:
                part.recorded[point, i] = tuple(context._actions[earlier_action_count:])
        hooks.call("amanda_op_analysed", context=context)

    def has_tool(self, tool: AnyTool) -> bool:
        """Return True if a tool, or an interchangeable one, is applied in this stack or in a stack around."""
        return any(applied is tool for applied in self.applied) or any(
            interchangeable(applied, tool) for applied in self.applied
        )

    def depends_on_shapes(self, op_id: int | None) -> bool:
        """Return True if the shapes of an op's inputs decide its plan; None for any op of a graph."""
        if self.keyed_by_shapes or not self.keyed_by_shapes_read:
            return self.keyed_by_shapes
        if op_id is None or op_id in self.shape_dependent_ops:
            return True
        return len(self.chain) > 1 and any(op_id in stack.shape_dependent_ops for stack in self.chain)

    def plan_key(self, ops: TensorOps, inputs: Sequence[Any], op_id: int | None = None) -> Hashable:
        """Return the key of a plan: the signature of the op's inputs, and the results of the guards.

        The guards are functions of the inputs, and shapes where they decide.  An exception of a guard passes,
        with a note that names the tool.
        op_id: id of an eager op; None for an op of a graph.
        """
        if not self.guards:
            return ops.signature(inputs)
        key: list[Hashable] = [ops.signature(inputs)]
        for routine in self.guards if self.keyed_by_callables else ():
            if callable(routine.guard):  # not "shape" or "read"
                try:
                    # A list of its own: a guard that empties it must not change the call.
                    key.append(routine.guard(list(inputs)))
                except BaseException as error:
                    tool_name = type(routine.tool).__name__
                    add_note(error, f"[amanda] tool {tool_name}, guard {routine.guard}")
                    raise
        return (*key, ops.shapes(inputs)) if self.depends_on_shapes(op_id) else tuple(key)

    def store_plan(self, op_id: int, key: Hashable, plan: Plan, shapes_read: Hashable = None) -> None:
        """Store a plan under its key; drop the op's oldest plan where there are too many.

        shapes_read: shapes that the plan's analysis has read, if no earlier analysis of the op has read any;
        they become a part of the op's keys, and its other plans are dropped.
        """
        if shapes_read is not None:
            # Earlier plans of the op have keys without shapes, under which no call looks from now on.
            self.forget_plans(op_id)
            self.shape_dependent_ops.add(op_id)
            assert isinstance(key, tuple)
            key = (*key, shapes_read)
        plans = self.plans.setdefault(op_id, {})
        plans[key] = plan
        if len(plans) > PLANS_PER_OP:
            # Dicts keep the order of insertion, so the first is the oldest.
            del plans[next(iter(plans))]

    def enable_double_backward(self) -> bool:
        """Make the next passes look for backward ops of backward ops; do nothing the second time.

        Returns True, and drops the native programs, if a plan had all its backward ops analysed: that no
        longer holds.
        """
        if self.double_backward:
            return False
        any_was_complete = False
        for stack in self.chain:
            stack.double_backward = True
            stack.passes.clear()
            for plan_by_key in stack.plans.values():
                for plan in plan_by_key.values():
                    if plan.has_backward_routines:
                        any_was_complete = any_was_complete or bool(plan.backward.analysed_for)
                        plan.backward.expect_new_backward_ops()
        # Programs in the table were built for backward ops of which nothing more was to come.
        if any_was_complete:
            self.table.clear()
        return any_was_complete

    def forget_programs(self, op_id: int) -> None:
        """Drop the native programs of an op, if there are any, so that its next calls run in Python."""
        self.passes.clear()
        call_cache = self.table.get(op_id)
        if isinstance(call_cache, interceptor.CallCache):
            call_cache.forget()

    def run_writes_in_python(self) -> None:
        """Run ops that write in Python from now on, also ops that have native programs."""
        for op_id in self.writing_ops:
            has_no_work = self.table.get(op_id) is None
            if has_no_work:
                # There is no call cache with programs to drop: the entry itself makes the op run natively.
                self.table.discard(op_id)
            else:
                self.forget_programs(op_id)

    def forget_plans(self, op_id: int) -> None:
        """Drop every plan of an op, and what the stack has recorded of the op."""
        self.passes.clear()
        self.plans.pop(op_id, None)
        self.writing_ops.discard(op_id)
        self.shape_dependent_ops.discard(op_id)
        self.table.discard(op_id)

    def drop_dead_op(self, op_id: int) -> None:
        """Drop every plan of an op that cannot execute again, and notify the tools."""
        self.forget_plans(op_id)
        for tool in self.applied:
            tool._amanda.note_dead_op(op_id)


def stack_for(tools: Sequence[AnyTool], parent: ToolStack | None) -> ToolStack:
    """Return the stack of the tools above `parent`, with the plans of earlier scopes of the same tools.

    Makes a stack if there is none, or if a tool has changed.  The stack is stored with the last tool, since
    the last tool depends on the others; a stack without tools is not stored.  Of more than STACKS_PER_TOOL
    stacks of a tool those that were used longest ago are dropped.
    """
    if not tools:
        return ToolStack(tools, parent)

    def scope_key(scope_tools: Sequence[AnyTool]) -> tuple[tuple[int, int], ...]:
        # With the versions: a tool with other routines than before must not find the plans of these.
        return tuple((tool._amanda.number, tool._amanda.version) for tool in scope_tools)

    outer_stacks = parent.chain if parent else ()
    key = (*(scope_key(stack.tools) for stack in outer_stacks), scope_key(tools))
    stack_by_key = tools[-1]._amanda.stacks
    if key not in stack_by_key:
        stack_by_key[key] = ToolStack(tools, parent)
    stack: ToolStack = stack_by_key[key]
    stack_by_key.move_to_end(key)
    while len(stack_by_key) > STACKS_PER_TOOL:
        stack_by_key.popitem(last=False)  # the one that was used longest ago
    return stack

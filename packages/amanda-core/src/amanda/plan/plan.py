"""Plans: the actions at one op that its analysis recorded, in running order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import ReplaceConflictError
from amanda.plan.action import Action, InstrumentationPoint, in_running_order
from amanda.plan.run_dicts import RecordedRunDicts, RunDicts

if TYPE_CHECKING:
    from amanda.plan.context import OpContext
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.plan.tools import AnyTool


RecordedActions = dict[tuple[InstrumentationPoint, int], tuple[Action, ...]]
"""Actions by the analysis routine that recorded them: its point, and its place in the stack's order there."""


ContextChanges = dict[str, Any]
"""Values that analyses wrote into a context, by key; `DELETED` for a key that they deleted."""

# None is a value that a tool may write into a context.
DELETED = object()


class Actions:
    """The actions at one op, or at one backward op: before it, instead of it, after it."""

    __slots__ = ("after", "before", "replace")  # `replace`: None where the op itself runs

    def __init__(self) -> None:
        self.before: Sequence[Action] = ()
        self.replace: Action | None = None
        self.after: Sequence[Action] = ()

    def add(self, actions: Iterable[Action]) -> None:
        """Add actions before, instead of and after the op, as their types say."""
        for action in actions:
            if action.type.is_replacement:
                self.replace = action
            elif action.type.is_after:
                self.after = (*self.after, action)
            else:
                self.before = (*self.before, action)

    @classmethod
    def from_records(cls, recorded: RecordedActions) -> Actions:
        """Return the actions that analysis routines recorded, in the order of the routines."""

        def analysis_order(routine_key: tuple[InstrumentationPoint, int]) -> tuple[bool, int]:
            # By side first: an action recorded after the op must not run ahead of one recorded before the op.
            point, index_in_stack = routine_key
            return point.is_after, index_in_stack

        actions = cls()
        for routine_key in sorted(recorded, key=analysis_order):
            actions.add(recorded[routine_key])
        return actions

    @classmethod
    def merged(cls, actions_by_stack: Sequence[Actions]) -> Actions:
        """Return the actions of several stacks, the outermost first, in the order in which they run.

        Raises ReplaceConflictError when tools of nested scopes replace one op.
        """
        # Most programs have one scope; its actions are the merged ones.
        if len(actions_by_stack) == 1:
            return actions_by_stack[0].in_running_order()
        merged = cls()
        before = [action for actions in actions_by_stack for action in actions.before]
        after = [action for actions in actions_by_stack for action in actions.after]
        merged.before = tuple(in_running_order(before, after=False))
        merged.after = tuple(in_running_order(after, after=True))
        merged.replace = single_replacement(actions.replace for actions in actions_by_stack)
        return merged

    def in_running_order(self) -> Actions:
        """Return the same actions in the order in which they run; `self` where there is nothing to sort."""
        if len(self.before) < 2 and len(self.after) < 2:
            return self
        ordered = Actions()
        ordered.before = tuple(in_running_order(self.before, after=False))
        ordered.after = tuple(in_running_order(self.after, after=True))
        ordered.replace = self.replace
        return ordered

    @property
    def inserted(self) -> tuple[Action, ...]:
        """Return the actions before and after the op, in order."""
        return (*self.before, *self.after)

    @property
    def all(self) -> tuple[Action, ...]:
        """Return all actions, in order."""
        return (*self.before, *([self.replace] if self.replace else []), *self.after)

    def __bool__(self) -> bool:
        return bool(self.before or self.replace or self.after)


class BackwardRecord:
    """The backward ops of a plan's op that have been analysed, with their actions.

    An op's backward ops depend on which of its inputs need a gradient.  So whether all of them are analysed
    is recorded for each `needs_grad`, as `EagerOps.needs_grad` returns it.

    actions: actions of the plan's scope, by the id of the backward op.
    partial_records: actions by analysis routine, for backward ops that only some of the tools have analysed.
    analysed_for: each `needs_grad` for which every backward op has been analysed.
    inactive_for: each `needs_grad` for which no tool acts at any backward op.
    native_hooks: actions of all scopes in native form, by the type and the place of a backward op.
    """

    __slots__ = ("actions", "analysed_for", "inactive_for", "native_hooks", "partial_records")

    def __init__(self) -> None:
        self.actions: dict[int, Actions] = {}
        self.partial_records: dict[int, RecordedActions] = {}
        self.expect_new_backward_ops()

    def expect_new_backward_ops(self) -> None:
        """Forget that all backward ops have been analysed, so that the next passes look for others.

        Actions at backward ops that have been analysed stay.
        """
        self.analysed_for: set[Hashable] = set()
        # None stands for an execution of which autodiff records nothing, so no backward op will come.
        self.inactive_for: set[Hashable] = {None}
        self.native_hooks: dict[Hashable, Any] = {}


# Most tools have no routines for backward ops, and a program has thousands of plans.
_NO_BACKWARD_RECORD = BackwardRecord()
"""Shared by all plans without routines for backward ops; nothing is added to it."""


class Plan(Actions):
    """The actions at one op of the tools of a stack, and of the stacks around it, in running order.

    scope_actions: the actions of the stack's own tools, without those of the stacks around.
    context: the context of the forward analyses; contexts of backward ops start as copies of it.
    outer_plans: the plan of each stack around, the outermost first.
    has_backward_routines: True if a stack of the chain has analysis routines for backward ops.
    backward: the analysed backward ops.
    context_changes: changes of the context by the stack's own tools after the op and at backward ops, by the
    id of the backward op, if any, and the point.
    changes_to_undo: changes that lead from the context back to its state before the op.

    Args:
        stack: Tools whose analysis routines record the actions.
        context: Context of the forward analyses.
        outer: Plan of the stack around; None for the outermost stack.
    """

    __slots__ = (
        "_recomputation_actions",
        "_recorded_run_dicts",
        "_run_dicts",
        "backward",
        "changes_to_undo",
        "context",
        "context_changes",
        "has_backward_routines",
        "outer_plans",
        "scope_actions",
        "stack",
    )

    def __init__(self, stack: ToolStack, context: OpContext, outer: Plan | None = None) -> None:
        super().__init__()
        self.stack = stack
        self.context = context
        self.scope_actions = Actions()
        self.outer_plans: tuple[Plan, ...] = () if outer is None else outer.chain
        # Made when first asked for: few plans have routines that take `run`.
        self._run_dicts: RunDicts | None = None
        self._recorded_run_dicts: RecordedRunDicts | None = None
        self._recomputation_actions: Actions | None = None
        self.has_backward_routines: bool = stack.wants_backward or (
            outer is not None and outer.has_backward_routines
        )
        self.backward = BackwardRecord() if self.has_backward_routines else _NO_BACKWARD_RECORD
        self.context_changes: dict[tuple[int | None, InstrumentationPoint], ContextChanges] = {}
        self.changes_to_undo: ContextChanges = {}

    @property
    def chain(self) -> tuple[Plan, ...]:
        """Return the plan of each stack around, the outermost first, and this one."""
        # Not stored: a plan that refers to itself would live until the garbage collector runs.
        return (*self.outer_plans, self)

    @property
    def plans_with_backward(self) -> list[Plan]:
        """Return the plans of the chain whose stacks have analysis routines for backward ops."""
        if not self.outer_plans:
            return [self] if self.has_backward_routines else []
        return [plan for plan in self.chain if plan.stack.wants_backward]

    def merge_actions(self) -> None:
        """Set the plan's actions from those that the tools of the chain have recorded so far.

        Raises ReplaceConflictError as `merged` does.
        """
        if self.outer_plans:
            merged = Actions.merged([plan.scope_actions for plan in self.chain])
        else:  # most programs have one scope
            merged = self.scope_actions.in_running_order()
        self.before, self.replace, self.after = merged.before, merged.replace, merged.after
        self._recomputation_actions = None

    def actions(self, is_recomputation: bool) -> Actions:
        """Return the actions at an execution; in a recomputation without routines that are not called again.

        Args:
            is_recomputation: Whether a framework runs the execution again.
        """
        if not is_recomputation:
            return self
        if self._recomputation_actions is None:
            repeated_actions = [action.for_recomputation() for action in self.all]
            self._recomputation_actions = Actions()
            self._recomputation_actions.add(action for action in repeated_actions if action is not None)
        return self._recomputation_actions

    @property
    def has_output_routines(self) -> bool:
        """Return True if a routine after the op receives outputs of the op, which the routine may change."""
        # A tally selects no values, so it cannot change an output, and in-place ops need no copies for it.
        return bool(self.after) and any(action.select != () for action in self.after)

    @property
    def takes_shapes(self) -> bool:
        """Return True if a routine before or after the op takes shapes."""
        if not (self.before or self.after):
            return False
        return any(action.takes_shapes for action in self.inserted)

    def run_dicts(self, ops: TensorOps, recomputable: bool) -> RunDicts:
        """Return the object that hands out the dicts `run` of the op's executions; create it the first time.

        Args:
            ops: Primitives of the framework's tensors.
            recomputable: Whether executions may be recomputations, or be recomputed.
        """
        if recomputable:
            if self._recorded_run_dicts is None:
                self._recorded_run_dicts = RecordedRunDicts(ops, self.context.get_op_id())
            return self._recorded_run_dicts
        if self._run_dicts is None:
            self._run_dicts = RunDicts()
        return self._run_dicts

    def dict_for_python(
        self, ops: TensorOps, recomputable: bool, called_natively: Sequence[Action]
    ) -> dict[str, Any]:
        """Return the dict `run` of an execution in Python; see `RunDicts.dict_for_python`.

        Args:
            ops: Primitives of the framework's tensors.
            recomputable: Whether executions may be recomputations, or be recomputed.
            called_natively: Actions whose routines native code has called.
        """
        if not (recomputable or called_natively):
            return {}
        return self.run_dicts(ops, recomputable).dict_for_python(called_natively)

    @property
    def takes_run(self) -> bool:
        """Return True if a routine at the op, or at an analysed backward op, takes `run`."""
        at_op = [plan.scope_actions for plan in self.chain]
        at_backward_ops = [actions for plan in self.chain for actions in plan.backward.actions.values()]
        return any(action.takes_run for actions in (*at_op, *at_backward_ops) for action in actions.all)

    @property
    def backward_takes_shapes(self) -> bool:
        """Return True if a routine at an analysed backward op takes shapes."""
        at_backward_ops = [
            actions for plan in self.plans_with_backward for actions in plan.backward.actions.values()
        ]
        return any(action.takes_shapes for actions in at_backward_ops for action in actions.all)

    def tools_to_analyse(self, backward_id: int, tools: Sequence[AnyTool]) -> Sequence[AnyTool]:
        """Return the tools among `tools` that have not analysed a backward op.

        Args:
            backward_id: Id of the backward op.
            tools: Tools of the plan's stack.
        """
        partial_records = self.backward.partial_records.get(backward_id)
        if partial_records is None:  # all tools have analysed the op, or none
            return () if backward_id in self.backward.actions else tools
        # `list`, since another thread may add records meanwhile.
        routine_keys, routines = list(partial_records), self.stack.routines
        ids_of_done_tools = {id(routines[point][index].tool) for point, index in routine_keys}
        return [tool for tool in tools if id(tool) not in ids_of_done_tools]

    def is_backward_analysed(self, backward_id: int) -> bool:
        """Return True if all tools of the plan's stack have analysed a backward op."""
        return backward_id in self.backward.actions and backward_id not in self.backward.partial_records

    def is_backward_complete(self, needs_grad: Hashable) -> bool:
        """Return True if every backward op of executions with this need of gradients has been analysed.

        True as well where no stack has analysis routines for backward ops.
        """
        if not self.outer_plans:  # the usual case: asked for each backward op of a first pass
            return not self.has_backward_routines or needs_grad in self.backward.analysed_for
        return all(needs_grad in plan.backward.analysed_for for plan in self.plans_with_backward)

    def wants_backward(self, needs_grad: Hashable) -> bool:
        """Return True if backward ops of an execution have to be analysed, or have actions.

        If neither, this is recorded in `backward.inactive_for`, so that the next answer is quick.

        Args:
            needs_grad: Key for which inputs need a gradient; None where autodiff records nothing.
        """
        if not self.has_backward_routines or needs_grad in self.backward.inactive_for:
            return False
        has_work = any(
            needs_grad not in plan.backward.analysed_for or any(plan.backward.actions.values())
            for plan in self.plans_with_backward
        )
        if not has_work:
            self.backward.inactive_for.add(needs_grad)
        return has_work


def single_replacement(candidates: Iterable[Action | None]) -> Action | None:
    """Return the only replacement among the candidates; None where all are None.

    Raises ReplaceConflictError when tools of nested scopes replace one op.
    """
    replacements = [action for action in candidates if action is not None]
    if not replacements:
        return None
    if len(replacements) > 1:
        first, second = (type(action.tool).__name__ for action in replacements[:2])
        raise ReplaceConflictError(
            f"{second} wants to replace an op that {first}, of a scope around, replaces already; one op "
            "has one replacement: apply one of the two, or let one use insert_before_op or insert_after_op"
        )
    return replacements[0]

"""Backward passes: the step at each backward op, with its analyses, its routines and their native hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from amanda import interceptor
from amanda.eager.program import program_on_values
from amanda.errors import RoutineError
from amanda.plan.action import Action, InstrumentationPoint, in_running_order
from amanda.plan.analysis import PendingBackwardPlan
from amanda.plan.plan import Actions, Plan, single_replacement
from amanda.plan.routine import NOT_CALLED, run_replacement, run_routine
from amanda.plan.tools import depends_on
from amanda.scope.state import State

if TYPE_CHECKING:
    from amanda.eager.driver import EagerDriver
    from amanda.eager.trace import Trace
    from amanda.plan.facts import OpFacts
    from amanda.plan.tool_stack import ToolStack
    from amanda.plan.tools import AnyTool


_NO_ACTIONS = Actions()
Pass = TypeVar("Pass", bound="BackwardPass")


def _compile_hooks(ops: EagerDriver, trace: Trace, op: Any, place: int) -> NativeHooks | None:
    """Compile the actions at an analysed backward op to native hooks; None where Python has to run them.

    Python has to while analyses are due, for a replacement, for routines that take `run`, and for more values
    than native code holds.  If a routine takes shapes, the result only creates hooks, by `for_shapes`.
    op, place: type of the backward op, and its place among the backward ops of the forward op.
    """
    if ops.reader is None or trace.facts is None:
        return None
    # Before every backward op is analysed, a pass has to come through Python to analyse the rest.
    if not trace.plan.is_backward_complete(trace.needs_grad):
        return None
    backward_id = trace.facts.backward_id(op.__name__, place)
    if any(backward_id not in plan.backward.actions for plan in trace.plan.plans_with_backward):
        return None
    actions_by_stack = [plan.backward.actions[backward_id] for plan in trace.plan.plans_with_backward]
    # Hooks run around the kernel; a replacement's result has to be put in its place by Python.
    if any(actions.replace for actions in actions_by_stack):
        return None
    actions = Actions.merged(actions_by_stack)
    # The dict belongs to one execution, and these hooks are shared by all executions.
    if any(action.takes_run for action in actions.all):
        return None
    # Made when an error or Python asks for them.  From the plan's facts, which keep no values.
    find_facts = partial(trace.plan.chain[0].context._facts.for_backward_op, op, backward_id, True)
    continuation, reader = _PythonContinuation(ops, find_facts), ops.reader
    program_before = program_on_values(actions.before, find_facts) if actions.before else None
    program_after = program_on_values(actions.after, find_facts) if actions.after else None
    if (actions.before and program_before is None) or (actions.after and program_after is None):
        return None  # too many values for native code

    def create_hooks(*shapes: tuple[Any, ...]) -> NativeHooks:
        """Create the hooks for an execution with these shapes, or for all executions if none are passed."""
        before = after = after_alone = None
        if program_before is not None:
            before = program_before.hook(reader, continuation, actions.before, None, *shapes)
        if program_after is not None:
            after = program_after.hook(reader, continuation, actions.after, None, *shapes)
        if before is not None and program_after is not None:
            after_alone = program_after.hook(reader, continuation, actions.after, before, *shapes)
        return NativeHooks(before, after, after_alone)

    takes_shapes = any(action.takes_shapes for action in actions.all)
    return NativeHooks(None, None, None, for_shapes=create_hooks) if takes_shapes else create_hooks()


class NativeHooks(NamedTuple):
    """Native hooks with the actions at an analysed backward op.

    before, after: hooks on the gradients that enter and that leave the op; a hook returns the gradients to
    use, or None. The field is None where there is no routine.
    after_alone: takes the place of both in a pass before which `before.is_idle` is true; None without both.
    for_shapes: creates hooks for an execution with these shapes; None where all executions share the hooks.
    """

    before: interceptor.Hook | None
    after: interceptor.Hook | None
    after_alone: interceptor.Hook | None
    for_shapes: Callable[[tuple[Any, ...]], NativeHooks] | None = None


class _PythonContinuation:
    """Continues a native hook's routines in Python, after a result that native code cannot put in place."""

    __slots__ = ("_find_facts", "_ops")

    def __init__(self, ops: EagerDriver, find_facts: Callable[[], OpFacts]) -> None:
        self._ops = ops
        self._find_facts = find_facts

    def __call__(
        self,
        actions: list[Action],
        grads: tuple[Any, ...],
        resumption: interceptor.Resumption,
        shapes: Any = None,
    ) -> tuple[Any, ...] | None:
        """Run the routines from the resumption's step on; return the gradients, or None if none changed."""
        step, returned = resumption.step, resumption.returned
        initial_grads = current_grads = list(grads)
        facts = self._find_facts()
        with interceptor.Suspension(), self._ops.without_overrides():
            for i, action in enumerate(actions):
                if i >= step:
                    result = returned if i == step else NOT_CALLED
                    current_grads = run_routine(
                        self._ops, action, current_grads, facts, {}, False, (), result, shapes=shapes
                    )
        return None if current_grads is initial_grads else tuple(current_grads)


class BackwardStep:
    """One backward op in one backward pass: the analyses that are due, and the routines of the open tools.

    `run_before` takes the gradients that enter the op, `run_after` those that leave it.
    """

    def __init__(
        self, driver: EagerDriver, trace: Trace, op: Any, place: int, state: State, replaceable: bool = True,
        order: int = 1, shapes: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """Find the actions and the tools that are due at the op.

        Args:
            driver: Driver of the framework.
            trace: Trace that the driver has attached to the op's execution.
            op: Type of the backward op, whose `__name__` tools see.
            place: Number that tells the backward ops of one execution apart, the same in each execution.
            state: State at the start of the pass.
            replaceable: Whether tools may replace the backward op.
            order: 2 for a backward op of a backward op, else 1.
            shapes: Shapes of the op in this execution, where the mark at the node has them; None for those of
                the trace.
        """
        assert trace.facts is not None
        self._ops = driver
        self._trace = trace
        self._state = state
        # A trace that executions share has no shapes; the mark of the node has those of its own execution.
        self._shapes = shapes or trace.shapes
        self.id = trace.facts.backward_id(op.__name__, place)
        self._facts = trace.facts_for(op, self.id, replaceable, order)
        # Analyses that `run_before` began and `run_after` completes.
        self._pending: list[tuple[Plan, PendingBackwardPlan]] = []
        self._actions: list[Actions] = []  # of each plan, that of the outermost stack first
        self._open_tool_ids: set[int] = set()
        # Analyses for `run_before`: the index in `_actions`, the plan, and the tools that analyse the op.
        self._due_analyses: list[tuple[int, Plan, Sequence[AnyTool]]] = []
        for plan in trace.plan.plans_with_backward:
            self._add_plan(plan)

    def _add_plan(self, plan: Plan) -> None:
        """Add a stack's actions and open tools, and the tools among these whose analysis of the op is due.

        Adds an op whose analysis is incomplete to the trace's `unanalysed_ids`.  If the values that an
        analysis reads are gone, the scope's report says so instead.
        """
        trace = self._trace
        actions = plan.backward.actions.get(self.id)
        open_tools = self._open_tools_of(plan.stack)
        self._open_tool_ids.update(map(id, open_tools))
        due_tools = plan.tools_to_analyse(self.id, open_tools) if self._state.cache else open_tools
        is_new = actions is None and due_tools and trace.needs_grad in plan.backward.analysed_for
        if is_new and not trace.values:
            # All backward ops had been analysed, so the values that an analysis would read were not stored.
            # They were if a plan of another scope lacked an analysis: then its tools may read what this one's
            # write into contexts.
            self._note_new_backward_op(plan)
        elif not trace.values:
            if actions is not None and due_tools:
                self._report_dropped_values(due_tools)
        else:
            if not plan.is_backward_analysed(self.id):
                trace.unanalysed_ids.add(self.id)
            if due_tools:
                self._due_analyses.append((len(self._actions), plan, due_tools))
        self._actions.append(_NO_ACTIONS if actions is None else actions)

    def _open_tools_of(self, stack: ToolStack) -> Sequence[AnyTool]:
        """Return the open tools with backward routines in a stack."""
        # The usual case needs no look at each tool.
        if stack is self._state.stack:
            return stack.backward_tools
        return [*filter(self._state.is_open, stack.backward_tools)]

    def _report_dropped_values(self, tools: Sequence[AnyTool]) -> None:
        """Report that tools do not analyse the op, since the values that the forward op read are gone."""
        names = ", ".join(type(tool).__name__ for tool in tools)
        if not self._state.cache:
            subject = f"the analysis of a backward op of {self._facts.op_type} without the cache"
            reason = (
                "its forward op ran with the cache, so what it read is gone: it does what was analysed before"
            )
        else:
            subject = f"the first pass of {names} through a backward op of {self._facts.op_type}"
            reason = "it came after a pass that did not retain the graph, so what the op read is gone"
        self._state.report(subject, reason, self._facts.source)

    def _note_new_backward_op(self, plan: Plan) -> None:
        """Record and report that the forward op has a backward op which no earlier pass had.

        Other shapes may bring one.  The next passes analyse it: the forward op's native programs are dropped,
        so that its next executions store the values for that.
        """
        # No longer true that every backward op is analysed: executions leave unanalysed ops again.
        plan.backward.analysed_for.discard(self._trace.needs_grad)
        self._trace.unanalysed_ids.add(self.id)
        self._trace.stack.forget_programs(self._trace.op_id)
        self._state.report(
            f"the first pass through a backward op that {self._facts.op_type} makes for some inputs alone",
            "it came after passes without one; it is seen from the next on", self._facts.source,
        )  # fmt: skip

    @staticmethod
    def native_hooks(driver: EagerDriver, trace: Trace, op: Any, place: int) -> NativeHooks | None:
        """Return native hooks for all passes through a backward op; None where a `BackwardStep` is needed.

        Call this method where the state `reuses_native_hooks`, for a trace of the state's own stack.

        Args:
            driver: Driver of the framework.
            trace: Trace that the driver has attached to the op's execution.
            op: Type of the backward op.
            place: Number that tells the backward ops of one execution apart.
        """
        # Executions of one op have nodes of the same types (`op`) at the same places.
        hooks = trace.plan.backward.native_hooks.get((op, place))
        if hooks is None:
            hooks = _compile_hooks(driver, trace, op, place)
            if hooks is not None:
                trace.plan.backward.native_hooks[op, place] = hooks
        return hooks

    @property
    def has_work(self) -> bool:
        """Return True if an analysis or an open tool's action is due, so that the driver has to add hooks."""
        if self._due_analyses:
            return True
        return any(self._is_open(action) for actions in self._actions for action in actions.all)

    def run_before(self, grad_outputs: Sequence[Any]) -> list[Any]:
        """Run routines before the op, and in the first call due analyses; return the gradients that enter."""
        grads = list(grad_outputs)
        self._facts.grad_outputs = list(grads)
        for index, plan, due_tools in self._due_analyses:
            self._actions[index] = self._analyse_before(plan, due_tools)
        # A framework may run the op again within this pass; that run analyses nothing.
        self._due_analyses = []
        actions_before = [action for actions in self._actions for action in actions.before]
        if len(actions_before) > 1:
            actions_before = in_running_order(actions_before, after=False)
        for action in actions_before:
            grads = self._run_routine(action, grads)
        # AccumulateGrad takes over a gradient without a copy only if nobody else holds a reference to it.
        self._facts.grad_outputs = None
        return grads

    def _analyse_before(self, plan: Plan, due_tools: Sequence[AnyTool]) -> Actions:
        """Run the due analyses before the op; return the actions of a stack at the op.

        `run_after` adds what analyses after the op record.  Returns the stored actions, and runs nothing, if
        another thread has finished the analysis.
        """
        tools = _select_with_dependencies(due_tools, plan.stack.backward_tools)
        pending_plans, facts = plan.stack.pending_plans, self._facts
        if self._state.cache:
            analysis_key: tuple[Any, ...] = plan, self.id
            if tools is not plan.stack.backward_tools:
                # Passes with other tools open analyse the op for these alone.
                analysis_key = *analysis_key, *(tool._amanda.number for tool in tools)
            with pending_plans.lock:
                pending = pending_plans.find(analysis_key)
                if pending is None:
                    if not plan.tools_to_analyse(self.id, due_tools):
                        return plan.backward.actions[self.id]  # another thread has finished the analysis
                    pending = PendingBackwardPlan(facts, plan, tools, ignore_earlier=False)
                    pending_plans.add(analysis_key, pending)
        else:
            pending = PendingBackwardPlan(facts, plan, tools, ignore_earlier=True)
        assert isinstance(pending, PendingBackwardPlan)
        pending.analyse(InstrumentationPoint.BEFORE_BACKWARD_OP, self._facts)
        self._pending.append((plan, pending))
        return pending.plan

    def run_after(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> list[Any]:
        """Run the replacement, analyses and routines after the op; return the gradients that leave the op.

        Stores the actions of completed analyses, and drops the values that the facts hold.

        Args:
            grad_inputs: Gradients that the op has computed.
            grad_outputs: Gradients that entered the op, after `run_before`.
        """
        grads = list(grad_inputs)
        replacements = [actions.replace for actions in self._actions if actions.replace is not None]
        replacement = single_replacement(replacements) if replacements else None
        if replacement is not None and self._is_open(replacement):
            grads = self._run_replacement(replacement, grads, list(grad_outputs))
        self._facts.grad_outputs, self._facts.grad_inputs = list(grad_outputs), list(grads)
        for plan, pending in self._pending:
            pending.analyse(InstrumentationPoint.AFTER_BACKWARD_OP, self._facts)
            pending.store()
            forward_op_has_died = self._trace.op_id not in plan.stack.plans  # with its model, in the pass
            if self._state.cache and forward_op_has_died:
                # Nothing else will drop the plan that was stored just now.
                plan.stack.drop_dead_op(self._trace.op_id)
        self._pending = []
        actions_after = [action for actions in self._actions for action in actions.after]
        if len(actions_after) > 1:
            actions_after = in_running_order(actions_after, after=True)
        for action in actions_after:
            grads = self._run_routine(action, grads)
        self._facts.drop_values()
        # An op with analyses to come stays unanalysed, since these need the execution's values.
        if all(plan.is_backward_analysed(self.id) for plan in self._trace.plan.plans_with_backward):
            self._trace.unanalysed_ids.discard(self.id)
        return grads

    def _is_open(self, action: Action) -> bool:
        """Return True if the action's tool is open."""
        return id(action.tool) in self._open_tool_ids

    def _run_routine(self, action: Action, grads: list[Any]) -> list[Any]:
        """Run one routine if its tool is open; return the gradients, changed or as they are.

        In a recomputation observers are left out, unless they take `recomputed`.
        """
        # A checkpointed function may contain a backward pass, which its recomputation repeats.
        current_action = action if self._state.recomputed_executions is None else action.for_recomputation()
        # None: the routine was called in the first execution, and is not called again.
        if current_action is None or not self._is_open(action):
            return grads
        shapes = self._shapes_so_far() if current_action.takes_shapes else None
        run, autodiff = self._trace.run, self._state.autodiff
        return run_routine(self._ops, current_action, grads, self._facts, run, autodiff, shapes=shapes)

    def _shapes_so_far(self) -> tuple[Any, ...]:
        """Return the shapes of the op's inputs and outputs, and of the gradients that exist at this point."""
        assert self._shapes is not None
        sides = [self._facts.grad_outputs, self._facts.grad_inputs]
        return (*self._shapes, *[self._ops.shapes(gradients) for gradients in sides if gradients is not None])

    def _run_replacement(self, action: Action, grads: list[Any], grad_outputs: list[Any]) -> list[Any]:
        """Run a replacement; return the gradients that leave the op, `grads` if it returned NotImplemented.

        A replacement returns as many gradients as the op, or only those that autograd needs; for any other
        number this method raises RoutineError.
        grads: gradients that the op has computed, None where autograd needs none.
        """
        result = run_replacement(self._ops, action, grad_outputs, self._facts, self._trace.run)
        if result is NotImplemented:
            return grads
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        required_positions = [i for i, grad in enumerate(grads) if grad is not None]
        if len(results) == len(grads):
            # Autograd wants no gradient where there was none.
            return [None if grad is None else new for grad, new in zip(grads, results, strict=True)]
        if len(results) == len(required_positions):
            for position, value in zip(required_positions, results, strict=True):
                grads[position] = value
            return grads
        error = RoutineError(
            f"{action} returned {len(results)} gradients; {self._facts.name} gives {len(grads)}, of "
            f"which {len(required_positions)} are wanted (positions {required_positions})"
        )
        raise self._facts.annotate_error(error, action)


class BackwardPass:
    """One backward pass: the steps at its backward ops, and its end.

    At its end the executions whose backward ops are all analysed are finished, and ids outside of modules
    count anew, as a new step of the program begins.
    """

    def __init__(self, driver: EagerDriver, state: State) -> None:
        """Begin a pass.

        Args:
            driver: Driver of the framework.
            state: State at the start of the pass.
        """
        self._driver, self._state = driver, state
        self._trace_by_id: dict[int, Trace] = {}

    def step(self, trace: Trace, op: Any, place: int, replaceable: bool = True) -> BackwardStep:
        """Return the step at a backward op of an execution; see `BackwardStep`.

        Args:
            trace: Trace that the driver has attached to the op's execution.
            op: Type of the backward op, whose `__name__` tools see.
            place: Number that tells the backward ops of one execution apart, the same in each execution.
            replaceable: Whether tools may replace the backward op.
        """
        self._trace_by_id[id(trace)] = trace
        return BackwardStep(self._driver, trace, op, place, self._state, replaceable)

    def __enter__(self: Pass) -> Pass:
        return self

    def __exit__(self, *_: object) -> None:
        interceptor.reset_root()
        for trace in self._trace_by_id.values():
            self._driver.mark_backward_analysed(trace)


def _select_with_dependencies(selection: Sequence[AnyTool], tools: Sequence[AnyTool]) -> Sequence[AnyTool]:
    """Return the tools among `tools` that are selected, or that a selected tool depends on.

    Returns `tools` itself if all are selected: callers compare by identity.
    """
    if len(selection) == len(tools):
        return tools

    def is_needed(tool: AnyTool) -> bool:
        return any(tool is selected or depends_on(selected, tool) for selected in selection)

    return [tool for tool in tools if is_needed(tool)]

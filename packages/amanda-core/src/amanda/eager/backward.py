"""One backward op in one backward pass: its analysis the first time, its routines every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda import interceptor
from amanda.eager.program import program_on_values
from amanda.errors import RoutineError
from amanda.plan.action import Action, InstrumentationPoint, in_turn
from amanda.plan.analysis import BackwardDraft, Draft
from amanda.plan.order import depends
from amanda.plan.plan import Actions, Plan, only_replacement
from amanda.plan.routine import NOT_CALLED, run_replacement, run_routine
from amanda.scope.state import State

if TYPE_CHECKING:
    from amanda.eager.execution import EagerExecution
    from amanda.eager.trace import Trace
    from amanda.plan.facts import OpFacts
    from amanda.plan.layer import Layer
    from amanda.plan.tools import AnyTool


_NOTHING = Actions()


def _settled(ops: EagerExecution, trace: Trace, op: Any, place: int) -> SettledStep | None:
    if ops.reader is None or trace.facts is None:
        return None
    if not trace.plan.is_complete(trace.gradients):
        return None
    id = trace.facts.backward_id(op.__name__, place)
    if any(id not in plan.backward.actions for plan in trace.plan.watching):
        return None
    several = [plan.backward.actions[id] for plan in trace.plan.watching]
    if any(actions.replace for actions in several):
        return None
    facts = trace.facts.at_backward(op, id, True)
    facts.drop_values()
    whole = Actions.merged(several)
    if any(action.takes_run for action in whole.all):
        return None
    rest, reader = _Rest(ops, facts), ops.reader
    sides = (whole.before, whole.after)
    programs = [program_on_values(actions, facts) if actions else None for actions in sides]
    if any(actions and program is None for actions, program in zip(sides, programs, strict=True)):
        return None

    before, after = programs

    def at(*shapes: tuple[Any, ...]) -> SettledStep:
        return SettledStep(
            None if before is None else before.hook(reader, rest, whole.before, *shapes),
            None if after is None else after.hook(reader, rest, whole.after, *shapes),
        )

    return SettledStep(None, None, at) if any(action.takes_shapes for action in whole.all) else at()


class SettledStep(NamedTuple):
    """The actions at a backward op that has been analysed; native code calls their routines.

    before, after: called with the gradients that enter the op, and with those that leave it; they give
    gradients that shall do so instead, or None. None themselves where there is no routine.
    at: makes them for an execution whose op had these shapes; None where they are those of all executions.
    """

    before: interceptor.Hook | None
    after: interceptor.Hook | None
    at: Callable[[tuple[Any, ...]], SettledStep] | None = None


class _Rest:
    """Goes on in Python where native code has stopped."""

    __slots__ = ("_facts", "_ops")

    def __init__(self, ops: EagerExecution, facts: OpFacts) -> None:
        self._ops = ops
        self._facts = facts

    def __call__(
        self, actions: list[Action], grads: tuple[Any, ...], done: Any, shapes: Any = None
    ) -> tuple[Any, ...] | None:
        step, returned = (-1, None) if done is NotImplemented else done
        given = values = list(grads)
        with interceptor.Suspension(), self._ops.reading():
            for i, action in enumerate(actions):
                if i >= step:
                    result = returned if i == step else NOT_CALLED
                    values = run_routine(
                        self._ops, action, values, self._facts, {}, False, (), result, shapes=shapes
                    )
        return None if values is given else tuple(values)


class BackwardStep:
    """The actions of the open scopes' tools at one backward op."""

    def __init__(
        self, ops: EagerExecution, trace: Trace, op: Any, place: int, state: State, replaceable: bool = True,
        order: int = 1, shapes: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """shapes: those of the op in this execution, where its mark has them."""
        assert trace.facts is not None
        self._ops = ops
        self._trace = trace
        self._state = state
        self._shapes = shapes or trace.shapes
        self.id = trace.facts.backward_id(op.__name__, place)
        self._facts = trace.facts.at_backward(op, self.id, replaceable, order)
        self._fresh: list[tuple[Plan, BackwardDraft]] = []
        self._known: list[Actions] = []
        self._open: list[AnyTool] = []
        self._missing: list[tuple[int, Plan, Sequence[AnyTool]]] = []  # each with its place among the known
        for plan in trace.plan.watching:
            known = plan.backward.actions.get(self.id)
            opened = self._opened(plan.layer)
            self._open += opened
            missing = plan.unanalysed(self.id, opened) if state.cache else opened
            if known is None and missing and trace.gradients in plan.backward.complete:
                self._reopen(plan)
            elif trace.facts.dropped:
                if known is not None and missing:
                    self._report_dropped(missing)
            else:
                if not plan.is_known(self.id):
                    trace.pending.add(self.id)
                if missing:
                    self._missing.append((len(self._known), plan, missing))
            self._known.append(_NOTHING if known is None else known)

    def _opened(self, layer: Layer) -> Sequence[AnyTool]:
        """Return the tools with backward routines in a layer that are open."""
        if layer is self._state.layer:
            return layer.backward_tools
        return [*filter(self._state.is_open, layer.backward_tools)]

    def _report_dropped(self, tools: Sequence[AnyTool]) -> None:
        names = ", ".join(type(tool).__name__ for tool in tools)
        if not self._state.cache:
            what = f"the analysis of a backward op of {self._facts.op_type} without the cache"
            reason = (
                "its forward op ran with the cache, so what it read is gone: it does what was analysed before"
            )
        else:
            what = f"the first pass of {names} through a backward op of {self._facts.op_type}"
            reason = "it came after a pass that did not retain the graph, so what the op read is gone"
        self._state.report(what, reason, self._facts.source)

    def _reopen(self, plan: Plan) -> None:
        """Note that the op made another backward op than those that were analysed, as for other shapes."""
        plan.backward.complete.discard(self._trace.gradients)
        self._trace.pending.add(self.id)
        self._trace.layer.relearn(self._trace.op_id)
        self._state.report(
            f"the first pass through a backward op that {self._facts.op_type} makes for some inputs alone",
            "it came after passes without one; it is seen from the next on", self._facts.source,
        )  # fmt: skip

    @staticmethod
    def settled(ops: EagerExecution, trace: Trace, op: Any, place: int) -> SettledStep | None:
        """Return hooks that do the same in each pass; None where a `BackwardStep` is due.

        Call it where the state `settles`, for a trace of the state's own layer.
        """
        known = trace.plan.backward.steps.get((op, place))
        if known is None:
            known = _settled(ops, trace, op, place)
            if known is not None:
                trace.plan.backward.steps[op, place] = known
        return known

    @property
    def wanted(self) -> bool:
        """Return True if there is anything to do: hooks go nowhere else."""
        known = (action for actions in self._known for action in actions.all)
        return bool(self._missing or any(map(self._is_open, known)))

    def before(self, grad_outputs: Sequence[Any]) -> list[Any]:
        """Return the gradients that shall enter the op instead of these."""
        grads = list(grad_outputs)
        self._facts.grad_outputs = list(grads)
        for i, plan, tools in self._missing:
            self._known[i] = self._analysed(plan, tools)
        self._missing = []  # another pass through the op, within this one, analyses nothing anew
        for action in in_turn((one for actions in self._known for one in actions.before), False):
            grads = self._run(action, grads)
        # A framework may keep a gradient as it is, not a copy, if nobody else holds it while the op runs.
        self._facts.grad_outputs = None
        return grads

    def _analysed(self, plan: Plan, missing: Sequence[AnyTool]) -> Actions:
        """Return what a layer's plan has for this op by now, or all that is recorded before the op runs."""
        tools = _with_dependencies(missing, plan.layer.backward_tools)

        def known() -> Actions | None:
            return None if plan.unanalysed(self.id, missing) else plan.backward.actions[self.id]

        def begin() -> BackwardDraft:
            return BackwardDraft(self._facts, plan, tools, not self._state.cache)

        draft: Draft[Actions] | Actions
        if self._state.cache:
            key: tuple[Any, ...] = plan, self.id
            if tools is not plan.layer.backward_tools:
                key = *key, *(tool._amanda.number for tool in tools)
            draft = plan.layer.drafts.share(key, known, begin)
        else:
            draft = begin()
        if isinstance(draft, Actions):
            return draft
        assert isinstance(draft, BackwardDraft)
        draft.analyse(InstrumentationPoint.BEFORE_BACKWARD_OP, self._facts)
        self._fresh.append((plan, draft))
        return draft.plan

    def after(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> list[Any]:
        """Return the gradients that shall leave the op instead of these."""
        grads = list(grad_inputs)
        replacement = only_replacement(actions.replace for actions in self._known)
        if replacement is not None and self._is_open(replacement):
            grads = self._replaced(replacement, grads, list(grad_outputs))
        self._facts.grad_outputs, self._facts.grad_inputs = list(grad_outputs), list(grads)
        for plan, draft in self._fresh:
            draft.analyse(InstrumentationPoint.AFTER_BACKWARD_OP, self._facts)
            draft.keep()
            if self._state.cache and self._trace.op_id not in plan.layer.plans:  # its model died meanwhile
                plan.layer.bury(self._trace.op_id)
        self._fresh = []
        for action in in_turn((one for actions in self._known for one in actions.after), True):
            grads = self._run(action, grads)
        self._facts.drop_values()
        if all(plan.is_known(self.id) for plan in self._trace.plan.watching):
            self._trace.pending.discard(self.id)
        return grads

    def _is_open(self, action: Action) -> bool:
        """Return True if the action's tool is open."""
        return any(action.tool is tool for tool in self._open)

    def _run(self, action: Action, grads: list[Any]) -> list[Any]:
        # A function that runs again may have a backward pass in it.
        called = action if self._state.recall is None else action.in_recomputation()
        if called is None or not self._is_open(action):
            return grads
        shapes = self._shapes_so_far() if called.takes_shapes else None
        run, autodiff = self._trace.run, self._state.autodiff
        return run_routine(self._ops, called, grads, self._facts, run, autodiff, shapes=shapes)

    def _shapes_so_far(self) -> tuple[Any, ...]:
        """Return the shapes of the op's inputs and outputs, and of the gradients that there are."""
        assert self._shapes is not None
        grads = (self._facts.grad_outputs, self._facts.grad_inputs)
        return (*self._shapes, *(self._ops.shapes(one) for one in grads if one is not None))

    def _replaced(self, action: Action, grads: list[Any], grad_outputs: list[Any]) -> list[Any]:
        result = run_replacement(self._ops, action, grad_outputs, self._facts, self._trace.run)
        if result is NotImplemented:
            return grads
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        wanted = [i for i, grad in enumerate(grads) if grad is not None]
        if len(results) == len(grads):
            return [None if grad is None else new for grad, new in zip(grads, results, strict=True)]
        if len(results) == len(wanted):
            for position, value in zip(wanted, results, strict=True):
                grads[position] = value
            return grads
        error = RoutineError(
            f"{action} returned {len(results)} gradients; {self._facts.name} gives {len(grads)}, of "
            f"which {len(wanted)} are wanted (positions {wanted})"
        )
        raise self._facts.explain(error, action)


def _with_dependencies(chosen: Sequence[AnyTool], tools: Sequence[AnyTool]) -> Sequence[AnyTool]:
    """Return those of `tools` that are chosen, or that a chosen one depends on."""
    if len(chosen) == len(tools):
        return tools
    return [tool for tool in tools if any(tool is one or depends(one, tool) for one in chosen)]

"""One backward op in one backward pass: its analysis the first time, its routines every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda._notes import explained
from amanda._opid import digest, mix
from amanda._plan import BackwardPlan, Layer, Plan, only_replacement
from amanda._routine import run_replacement, run_routine
from amanda.action import Action, InstrumentationPoint
from amanda.context import OpContext
from amanda.errors import RoutineError

if TYPE_CHECKING:
    from amanda._eager import EagerExecution, Trace
    from amanda._state import State


def backward_id(op_id: int, name: str, place: int) -> int:
    """Id of a backward op: its forward op's, its name, and its place among that op's backward ops."""
    return mix(mix(op_id, digest(name)), place) or 1


class BackwardStep:
    """What the tools of the open scopes do at one backward op."""

    def __init__(
        self, ops: EagerExecution, trace: Trace, op: Any, place: int, state: State, replaceable: bool = True
    ) -> None:
        assert trace.facts is not None
        self._ops = ops
        self._trace = trace
        self._state = state
        self.id = backward_id(trace.op_id, op.__name__, place)
        self._facts = trace.facts.at_backward(op, self.id, replaceable)
        self._fresh: list[tuple[Plan, BackwardPlan, OpContext]] = []
        self._plans: list[BackwardPlan] = []
        self._missing: list[tuple[Layer, Plan]] = []
        self._complete = True  # no layer has routines for it whose scope is closed
        for layer, plan in trace.plans:
            known = plan.backward.get(self.id)
            if known is not None:
                self._plans.append(known)
            elif layer.wants_backward and trace.gradients not in plan.settled:
                trace.pending.add(self.id)
                if all(map(state.is_open, layer.tools)):
                    self._missing.append((layer, plan))
                else:
                    self._complete = False

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do: hooks go nowhere else."""
        return bool(self._missing or any(self._open(plan) for plan in self._plans))

    def _open(self, plan: BackwardPlan) -> list[Action]:
        actions = [*plan.before, *([plan.replace] if plan.replace else []), *plan.after]
        return [action for action in actions if self._state.is_open(action.tool)]

    def before(self, grad_outputs: Sequence[Any]) -> list[Any]:
        """Gradients that shall enter the op instead of these."""
        grads = list(grad_outputs)
        self._facts.grad_outputs = list(grads)
        for layer, plan in self._missing:
            fresh = BackwardPlan()
            context = OpContext(self._facts, layer.analyse, plan.context)
            fresh.add(context.trigger_callback(InstrumentationPoint.BEFORE_BACKWARD_OP))
            self._fresh.append((plan, fresh, context))
            self._plans.append(fresh)
        for backward in self._plans:
            for action in backward.before:
                grads = self._run(action, grads)
        # A framework may keep a gradient as it is, not a copy, if nobody else holds it while the op runs.
        self._facts.grad_outputs = None
        return grads

    def after(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> list[Any]:
        """Gradients that shall leave the op instead of these."""
        grads = list(grad_inputs)
        replacement = only_replacement(plan.replace for plan in self._plans)
        if replacement is not None and self._state.is_open(replacement.tool):
            grads = self._replaced(replacement, grads, list(grad_outputs))
        self._facts.grad_outputs, self._facts.grad_inputs = list(grad_outputs), list(grads)
        for plan, fresh, context in self._fresh:
            fresh.add(context.trigger_callback(InstrumentationPoint.AFTER_BACKWARD_OP))
            plan.backward[self.id] = fresh
        for backward in self._plans:
            for action in backward.after:
                grads = self._run(action, grads)
        self._facts.drop_values()
        if self._complete:
            self._trace.pending.discard(self.id)
        return grads

    def _run(self, action: Action, grads: list[Any]) -> list[Any]:
        if not self._state.is_open(action.tool):
            return grads
        return run_routine(self._ops, action, grads, self._facts, self._trace.run, self._state)

    def _replaced(self, action: Action, grads: list[Any], grad_outputs: list[Any]) -> list[Any]:
        result = run_replacement(self._ops, action, grad_outputs, self._facts, self._trace.run)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        wanted = [i for i, grad in enumerate(grads) if grad is not None]
        if len(results) == len(grads):
            return [None if grad is None else new for grad, new in zip(grads, results, strict=True)]
        if len(results) == len(wanted):
            for position, value in zip(wanted, results, strict=True):
                grads[position] = value
            return grads
        with explained(self._facts, action.tool, str(action)):
            raise RoutineError(
                f"{action} returned {len(results)} gradients; {self._facts.name} gives {len(grads)}, of "
                f"which {len(wanted)} are wanted (positions {wanted})"
            )

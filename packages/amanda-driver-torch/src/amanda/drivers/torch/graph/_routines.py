"""Routines at the ops of a graph, tried without data: in the graph if traceable, else calls of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from amanda.action import differentiable, routine_name
from amanda.backend import Action, OpFacts
from amanda.errors import RoutineError
from amanda.plan import Actions, run_replacement, run_routine

from ._node_runs import uninstrumented
from ._observers import WaitingObservers
from ._ops import TENSORS, GraphProgram, call_python, tensor_ops
from ._python_calls import (
    GradientReplacementCall,
    PlaceValues,
    PythonCall,
    ReplacementCall,
    select_read_gradients,
    with_clones,
)
from ._routine_inputs import HeldTensors

if TYPE_CHECKING:
    from amanda.graph import ValueHistory

    from ._instrumented import BackwardSite, InstrumentedCall, InstrumentedNode, OpStep
    from ._node_runs import NodeRun
    from ._symbols import GraphSymbols


class NodeRoutines:
    """Routines of one call of a node, and of the backward pass of that call.

    token: of the execution, if routines are called as Python.  substituting: makes a context in which values
    of the graph replace the tensors that the routines hold.
    """

    def __init__(
        self,
        program: GraphProgram,
        token: torch.Tensor | None,
        substituting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.program = program
        self.token = token
        self._substituting = substituting

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter a context for routines, in which nothing is instrumented."""
        with uninstrumented(), self._substituting():
            yield

    def is_inlined(self, action: Action) -> bool:
        """Return True if a routine becomes part of the graph."""
        return action.traceable and not action.takes_run and action not in self.program.called_as_python

    def run_action(
        self,
        action: Action,
        values: list[Any],
        facts: OpFacts,
        mutable: Sequence[int] = (),
    ) -> list[Any]:
        """Run a routine, and return the values after it."""
        if action.opening:
            return values
        if not self.is_inlined(action):
            action = self._as_python_call(action, facts)
        return run_routine(tensor_ops(), action, values, facts, {}, self.program.state.autodiff, mutable)

    def run_all(
        self, actions: Iterable[Action], values: list[Any], facts: OpFacts, mutable: Sequence[int] = ()
    ) -> list[Any]:
        """Run routines in order, and return the values after them.

        mutable: positions of the user's tensors that the op writes.
        """
        for action in actions:
            values = self.run_action(action, values, facts, mutable)
        return values

    def replace_op(self, action: Action, call: Any, inputs: list[Any], facts: OpFacts) -> Any:
        """Run a routine that replaces an op, and return its outputs; NotImplemented if the op is to run.

        What an op in place writes is written into its inputs here, if the routine is called as Python.
        """
        if self.is_inlined(action):
            result = run_replacement(
                tensor_ops(), action, inputs, facts, {}, call.target_positions, call.as_function()
            )
            return result if result is NotImplemented else call.in_form_of_result(result)
        # Autograd saves the clones, so that the writes into the targets below leave saved tensors alone.
        values = PlaceValues(with_clones(inputs, call.target_positions))
        compute, targets = call.as_function(), call.target_positions
        slot = self._slot_of_call(
            action, facts, values, lambda: ReplacementCall(action, facts, values, compute, targets)
        )
        results = self._call_in_autograd(slot, values, [])
        if call.target_positions:
            for target, result in zip(call.target_positions, results, strict=True):
                inputs[target].copy_(result)
            written = [inputs[target] for target in call.target_positions]
            return written[0] if len(written) == 1 else tuple(written)
        return call.in_form_of_result(tuple(results)) if len(results) != 1 else results[0]

    def hook_node(self, node: Any, facts: OpFacts, plan: Actions) -> None:
        """Put routines around a backward op of autograd's graph."""
        incoming: list[Any] = []

        def before(gradients: Sequence[Any]) -> Any:
            """Return the incoming gradients after the routines, and hold them for a replacement."""
            with self.running():
                incoming[:] = self.run_all(plan.before, list(gradients), facts)
            return tuple(incoming)

        def after(gradients: Sequence[Any], _: Sequence[Any]) -> Any:
            """Return the outgoing gradients, those of a replacement if there is one, after the routines."""
            with self.running():
                outgoing = list(gradients)
                if plan.replace is not None:
                    outgoing = self._replace_gradients(plan.replace, outgoing, incoming, facts)
                return tuple(self.run_all(plan.after, outgoing, facts))

        # A replacement takes the incoming gradients and returns the outgoing ones: it needs both hooks.
        if plan.before or plan.replace:
            node.register_prehook(before)
        if plan.after or plan.replace:
            node.register_hook(after)

    def _replace_gradients(
        self, action: Action, outgoing: list[Any], incoming: list[Any], facts: OpFacts
    ) -> list[Any]:
        """Return the outgoing gradients of a backward op, computed by the routine that replaces the op.

        Gradients that nothing reads stay None; all are the kernel's if the routine returns NotImplemented.
        """
        read_positions = [i for i, gradient in enumerate(outgoing) if gradient is not None]
        if self.is_inlined(action):
            result = run_replacement(tensor_ops(), action, incoming, facts, {})
            if result is NotImplemented:
                return outgoing
            results = select_read_gradients(result, len(outgoing), read_positions, action, facts)
        else:
            values = PlaceValues(incoming)
            likes = [outgoing[i] for i in read_positions]
            is_read = tuple(gradient is not None for gradient in outgoing)
            slot = self._slot_of_call(
                action,
                facts,
                values,
                lambda: GradientReplacementCall(action, facts, values, is_read),
                is_read,
            )
            results = call_python(
                "call", self.token, [*values.flat, *likes], values.numbers, likes, self.program.number, slot
            )
        gradients = list(outgoing)
        for i, gradient in zip(read_positions, results, strict=True):
            gradients[i] = gradient
        return gradients

    def _as_python_call(self, action: Action, facts: OpFacts) -> Action:
        """Return an action whose routine inserts a custom op that calls the action's routine as Python."""
        is_taped = (action.differentiable or self.program.state.autodiff) and not action.observer

        def call(*place_values: Any) -> Any:
            return self._insert_python_call(action, facts, PlaceValues(place_values), is_taped)

        # Without the keyword arguments, which `PythonCall` passes.
        call.__qualname__ = routine_name(action.func)
        func = differentiable(call) if is_taped else call
        return Action(action.type, func, action.tool, action.select, kwargs={})

    def _insert_python_call(self, action: Action, facts: OpFacts, values: PlaceValues, is_taped: bool) -> Any:
        """Insert a custom op that calls a routine, or let an observer wait; return what the routine would.

        is_taped: whether the routine takes part in autodiff.
        """
        result_positions = () if action.observer else values.tensor_positions
        slot = self._slot_of_call(
            action, facts, values, lambda: PythonCall(action, facts, values, result_positions)
        )
        # Each call of Python is a kernel of its own to compilers: observers may share one.
        if self.program.can_gather(action, facts) and self.token is not None:
            waiting = WaitingObservers.of_token(self.program, self.token)
            waiting.add(self.token, slot, values, action.type.is_backward)
            return None
        likes = list(values.tensors) if result_positions else []
        if is_taped:
            results = self._call_in_autograd(slot, values, likes)
        else:
            results = call_python(
                "call", self.token, values.flat, values.numbers, likes, self.program.number, slot
            )
        return _as_routine_returns(values.with_tensors(results)) if result_positions else None

    def _slot_of_call(
        self,
        action: Action,
        facts: OpFacts,
        values: PlaceValues,
        make: Callable[[], PythonCall],
        form: Any = None,
    ) -> int:
        """Return the slot of a routine's call, with the constants of this run.

        A backend that runs the graph as it is comes here in each run, with other constants.
        """
        # The call in the program's table holds the facts, so that no other object gets their `id`.
        slot = self.program.slot((id(facts), action, values.pattern, form), make)
        called: Any = self.program.table[slot]
        called.constants = values.constants
        return slot

    def _call_in_autograd(
        self, slot: int, values: PlaceValues, likes: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Call the routine at a slot as Python, as a part of autograd's graph."""
        return list(
            TapedRoutine.apply(  # type: ignore[no-untyped-call]
                self.token, self.program.number, slot, len(likes), values.numbers, *values.flat, *likes
            )
        )


def _as_routine_returns(values: list[Any]) -> Any:
    """Return values as a routine returns them: a single tensor itself, anything else as a list."""
    is_one_tensor = len(values) == 1 and not isinstance(values[0], list)
    return values[0] if is_one_tensor else values


class TapedRoutine(torch.autograd.Function):
    """Autograd function of a routine that is called as Python and takes part in autodiff."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, program: int, slot: int, count: int, numbers: list[int], *tensors: Any
    ) -> Any:
        """Call the routine at a slot; tensors: its values, then `count` tensors like its results."""
        values, likes = list(tensors[: len(tensors) - count]), list(tensors[len(tensors) - count :])
        ctx.slot = slot
        ctx.count = count
        ctx.save_for_backward(token, *values)
        return tuple(call_python("tape", token, values, numbers, likes, program, slot))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the values that need one, and None for all other arguments."""
        token, *values = ctx.saved_tensors
        pulled = call_python("pull", token, list(gradients), values, ctx.slot)
        first = _ARGUMENTS_BEFORE_VALUES
        needs_gradient = ctx.needs_input_grad[first : first + len(values)]
        input_gradients = [
            gradient if needs else None for gradient, needs in zip(pulled, needs_gradient, strict=True)
        ]
        # Before the values come other arguments, after them the likes, of which none has a gradient.
        return *[None] * first, *input_gradients, *[None] * ctx.count


_ARGUMENTS_BEFORE_VALUES = 5
"""Arguments of `TapedRoutine` before the values: token, program, slot, count and numbers."""


class RoutineTrials:
    """Trial runs of the traceable routines of nodes, before the graph is copied.

    history: of values that routines read, for earlier graphs of the same code.
    """

    def __init__(self, routines: NodeRoutines, symbols: GraphSymbols, history: ValueHistory | None) -> None:
        self._routines = routines
        self._symbols = symbols
        self._history = history

    def try_routines_of_node(
        self, instrumented: InstrumentedNode, node_run: NodeRun, steps: Sequence[OpStep]
    ) -> None:
        """Try the routines at a node's ops and at the backward ops of these."""
        for call, step in zip(node_run.calls, steps, strict=True):
            plan, facts = step.plan, step.facts
            inputs = self._try_all(plan.before, list(call.call.inputs), facts, instrumented.held_tensors)
            if plan.replace is not None:
                self._try_routine(plan.replace, inputs, facts, instrumented.held_tensors)
            self._try_all(plan.after, call.values, facts, instrumented.held_tensors)
            for site in step.backward.values():
                self.try_routines_of_backward_op(instrumented, site)

    def try_routines_of_backward_op(self, instrumented: InstrumentedCall, site: BackwardSite) -> None:
        """Try the routines at a backward op."""
        facts, plan = site
        incoming, outgoing = list(facts.grad_outputs or ()), list(facts.grad_inputs or ())
        incoming = self._try_all(plan.before, incoming, facts, instrumented.held_tensors)
        if plan.replace is not None:
            self._try_routine(plan.replace, incoming, facts, instrumented.held_tensors)
        self._try_all(plan.after, outgoing, facts, instrumented.held_tensors)

    def _try_all(
        self, actions: Sequence[Action], values: list[Any], facts: OpFacts, held_tensors: HeldTensors
    ) -> list[Any]:
        """Try routines one after another, each on the values after the last."""
        for action in actions:
            values = self._try_routine(action, values, facts, held_tensors)
        return values

    def _try_routine(
        self, action: Action, values: list[Any], facts: OpFacts, held_tensors: HeldTensors
    ) -> list[Any]:
        """Run an inlined routine without data, and return the values after it.

        Notes the routine and the tensors that it holds.  A routine that cannot be traced, or that reads what
        changes often, is noted as called by Python; the values are then returned unchanged.
        Raises RoutineError for a routine that breaks a rule.
        """
        if not self._routines.is_inlined(action):
            return values
        changing_name = self._history.volatile_name(action) if self._history is not None else ""
        if changing_name:
            self._call_as_python(action, facts, f"what it reads changes often: {changing_name}")
            return values
        program, used_tensors = self._routines.program, HeldTensors()
        try:
            # A real tensor that the mode lets through would be a constant of the graph without notice.
            with (
                program.reads.record_tracing([action]),
                used_tensors.collecting(self._make_stand_in),
                patch.object(self._symbols.fakes, "allow_non_fake_inputs", False),
            ):
                changed = self._run_without_data(action, values, facts)
        except RoutineError:  # the routine breaks a rule, as it would in Python
            raise
        except Exception as error:  # of any kind: routines may do what only values allow
            first_line = str(error).partition("\n")[0]
            self._call_as_python(action, facts, f"it cannot be traced: {first_line}")
            return values
        program.traced.append((action, used_tensors.tensors))
        for tensor in used_tensors.tensors:
            held_tensors.add(tensor)
        return changed

    def _make_stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data for one that a routine holds."""
        stand_in = self._symbols.fakes.from_tensor(tensor, static_shapes=True)
        return stand_in.detach().requires_grad_(tensor.requires_grad)

    def _call_as_python(self, action: Action, facts: OpFacts, reason: str) -> None:
        """Note, and report, that the graph is to call a traceable routine as Python."""
        program = self._routines.program
        program.called_as_python[action] = facts, reason
        program.report(f"traceable {action}", f"{reason}, so it runs as Python")

    def _run_without_data(self, action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
        """Run a routine, and return the values after it; those of a replacement are not used."""
        if action.type.is_replacement:
            run_replacement(TENSORS, action, values, facts, {})
            return values
        return run_routine(TENSORS, action, values, facts, {}, self._routines.program.state.autodiff)

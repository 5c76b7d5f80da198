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
    """Runs the routines at one call of a node and in its backward pass, in the graph or as calls of Python.

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
        self, action: Action, values: list[Any], facts: OpFacts, mutable_positions: Sequence[int] = ()
    ) -> list[Any]:
        """Run a routine, in the graph or by a call of Python, and return the values after it.

        The routine of an opening is skipped: it runs as the graph's run begins.
        """
        if action.opening:
            return values
        if not self.is_inlined(action):
            action = self._as_python_call(action, facts)
        return run_routine(
            tensor_ops(), action, values, facts, {}, self.program.state.autodiff, mutable_positions
        )

    def run_all(
        self,
        actions: Iterable[Action],
        values: list[Any],
        facts: OpFacts,
        mutable_positions: Sequence[int] = (),
    ) -> list[Any]:
        """Run routines in order, and return the values after them.

        mutable_positions: of the user's tensors that the op writes.
        """
        for action in actions:
            values = self.run_action(action, values, facts, mutable_positions)
        return values

    def replace_op(self, action: Action, call: Any, inputs: list[Any], facts: OpFacts) -> Any:
        """Run a routine that replaces an op, and return its outputs; NotImplemented if the op is to run.

        If the routine of an op in place is called as Python, its results are written into the inputs here.
        """
        if self.is_inlined(action):
            result = run_replacement(
                tensor_ops(), action, inputs, facts, {}, call.target_positions, call.as_function()
            )
            return result if result is NotImplemented else call.in_form_of_result(result)
        # Autograd saves the clones, so that the writes into the targets below leave saved tensors alone.
        target_positions, compute = call.target_positions, call.as_function()
        values = PlaceValues(with_clones(inputs, target_positions))
        slot = self._slot_of_call(
            action, facts, values, lambda: ReplacementCall(action, facts, values, compute, target_positions)
        )
        results = self._call_in_autograd(slot, values, likes=[])
        if target_positions:
            targets = [inputs[i] for i in target_positions]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
            return targets[0] if len(targets) == 1 else tuple(targets)
        return call.in_form_of_result(tuple(results)) if len(results) != 1 else results[0]

    def hook_node(self, node: Any, facts: OpFacts, actions: Actions) -> None:
        """Hook a node of autograd to run the routines before and after its backward op, or in its place."""
        incoming: list[Any] = []  # set by `before`, for a replacement in `after`

        def before(gradients: Sequence[Any]) -> Any:
            """Return the incoming gradients after the routines, and hold them for a replacement."""
            with self.running():
                incoming[:] = self.run_all(actions.before, list(gradients), facts)
            return tuple(incoming)

        def after(gradients: Sequence[Any], _: Sequence[Any]) -> Any:
            """Return the outgoing gradients, those of a replacement if there is one, after the routines."""
            with self.running():
                outgoing = list(gradients)
                if actions.replace is not None:
                    outgoing = self._replace_gradients(actions.replace, outgoing, incoming, facts)
                return tuple(self.run_all(actions.after, outgoing, facts))

        # A replacement takes the incoming gradients and returns the outgoing ones: it needs both hooks.
        if actions.before or actions.replace:
            node.register_prehook(before)
        if actions.after or actions.replace:
            node.register_hook(after)

    def _replace_gradients(
        self, action: Action, outgoing: list[Any], incoming: list[Any], facts: OpFacts
    ) -> list[Any]:
        """Return the outgoing gradients of a backward op, computed by the routine that replaces the op.

        outgoing: the kernel's, None where nothing reads a gradient; returned if the routine returns
        NotImplemented.
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
                action, facts, values, lambda: GradientReplacementCall(action, facts, values, is_read),
                key_suffix=is_read,
            )  # fmt: skip
            results = call_python(
                "call", self.token, [*values.flat, *likes], values.numbers, likes, self.program.number, slot
            )
        gradients = list(outgoing)
        for i, gradient in zip(read_positions, results, strict=True):
            gradients[i] = gradient
        return gradients

    def _as_python_call(self, action: Action, facts: OpFacts) -> Action:
        """Return an action whose routine inserts a custom op that calls the action's routine as Python.

        The action is differentiable if that routine takes part in autodiff, as an observer does not.
        """
        is_taped = (action.differentiable or self.program.state.autodiff) and not action.observer

        def insert_call(*place_values: Any) -> Any:
            return self._insert_python_call(action, facts, PlaceValues(place_values), is_taped)

        insert_call.__qualname__ = routine_name(action.func)
        func = differentiable(insert_call) if is_taped else insert_call
        # No keyword arguments here: `PythonCall` passes those of the routine.
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
            waiting_observers = WaitingObservers.of_token(self.program, self.token)
            waiting_observers.add(self.token, slot, values, action.type.is_backward)
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
        self, action: Action, facts: OpFacts, values: PlaceValues, make_call: Callable[[], PythonCall],
        key_suffix: Any = None,
    ) -> int:  # fmt: skip
        """Return the slot of a routine's call, which is made the first time; it gets this run's constants.

        A backend that runs the graph as it is comes here in each run, with other constants.
        key_suffix: tells apart calls of the routine at one place that differ in more than their values.
        """
        # The call in the program's table holds the facts, so that no other object gets their `id`.
        slot = self.program.slot_of((id(facts), action, values.pattern, key_suffix), make_call)
        call: Any = self.program.table[slot]
        call.constants = values.constants
        return slot

    def _call_in_autograd(
        self, slot: int, values: PlaceValues, likes: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Call the routine at a slot as Python, as a function of autograd; return its results.

        likes: tensors in whose form the results are returned; empty for the results as they are.
        """
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
        ctx: Any, token: torch.Tensor, program: int, slot: int, like_count: int, numbers: list[int],
        *tensors: Any,
    ) -> Any:  # fmt: skip
        """Call the routine at a slot; tensors: its values, then `like_count` tensors like its results."""
        value_count = len(tensors) - like_count
        values, likes = list(tensors[:value_count]), list(tensors[value_count:])
        ctx.slot = slot
        ctx.like_count = like_count
        ctx.save_for_backward(token, *values)
        return tuple(call_python("tape", token, values, numbers, likes, program, slot))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the values that need one, and None for all other arguments."""
        token, *values = ctx.saved_tensors
        value_gradients = call_python("pull", token, list(gradients), values, ctx.slot)
        first_value = _ARGUMENTS_BEFORE_VALUES
        values_need_gradient = ctx.needs_input_grad[first_value : first_value + len(values)]
        needed_gradients = [
            gradient if needs_gradient else None
            for gradient, needs_gradient in zip(value_gradients, values_need_gradient, strict=True)
        ]
        # Before the values come other arguments, after them the likes, of which none has a gradient.
        return *[None] * first_value, *needed_gradients, *[None] * ctx.like_count


_ARGUMENTS_BEFORE_VALUES = 5
"""Arguments of `TapedRoutine` before the values: token, program, slot, like_count and numbers."""


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
        """Try the routines at a node's ops and at the backward ops of these.

        `instrumented` gets the tensors that the routines hold.
        """
        for call, step in zip(node_run.calls, steps, strict=True):
            actions, facts = step.actions, step.facts
            inputs = self._try_all(
                actions.before, list(call.eager_call.inputs), facts, instrumented.held_tensors
            )
            if actions.replace is not None:
                self._try_routine(actions.replace, inputs, facts, instrumented.held_tensors)
            self._try_all(actions.after, call.values, facts, instrumented.held_tensors)
            for site in step.backward.values():
                self.try_routines_of_backward_op(instrumented, site)

    def try_routines_of_backward_op(self, instrumented: InstrumentedCall, site: BackwardSite) -> None:
        """Try the routines at a backward op; `instrumented` gets the tensors that they hold."""
        facts, actions = site
        incoming, outgoing = list(facts.grad_outputs or ()), list(facts.grad_inputs or ())
        incoming = self._try_all(actions.before, incoming, facts, instrumented.held_tensors)
        if actions.replace is not None:
            self._try_routine(actions.replace, incoming, facts, instrumented.held_tensors)
        self._try_all(actions.after, outgoing, facts, instrumented.held_tensors)

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
        """Run a traceable routine without data, and return the values after it.

        Notes the routine and the tensors that it holds.  One that cannot be traced, or that reads values that
        change often, is noted to be called as Python; the values are then returned unchanged, as they are for
        a routine that is no part of the graph.  Raises RoutineError for a routine that breaks a rule.
        """
        if not self._routines.is_inlined(action):
            return values
        name_of_changing_value = "" if self._history is None else self._history.volatile_name(action)
        if name_of_changing_value:
            self._call_as_python(action, facts, f"what it reads changes often: {name_of_changing_value}")
            return values
        program, used_tensors = self._routines.program, HeldTensors()
        try:
            # A real tensor that the mode lets through would be a constant of the graph without notice.
            with (
                program.reads.record_tracing([action]),
                used_tensors.collecting(self._make_stand_in),
                patch.object(self._symbols.fake_mode, "allow_non_fake_inputs", False),
            ):
                changed_values = self._run_without_data(action, values, facts)
        except RoutineError:  # the routine breaks a rule, as it would in Python
            raise
        except Exception as error:  # of any kind: routines may do what only values allow
            first_line = str(error).partition("\n")[0]
            self._call_as_python(action, facts, f"it cannot be traced: {first_line}")
            return values
        program.traced.append((action, used_tensors.tensors))
        for tensor in used_tensors.tensors:
            held_tensors.add(tensor)
        return changed_values

    def _make_stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data for one that a routine holds."""
        stand_in = self._symbols.fake_mode.from_tensor(tensor, static_shapes=True)
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

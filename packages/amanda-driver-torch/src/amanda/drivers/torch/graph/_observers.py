"""Observers that graphs call later than at their ops: many in one call of Python, or after the graph has run.

A call of Python for each value would be a kernel for each, in an order that the compiler must keep. So in a
graph that AOTAutograd traces, values wait, and few calls hand them over to their observers. Observers that
get no value are called when the graph has run, and the graph is compiled without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from amanda import interceptor
from amanda.backend import Action, Executions, Observed, OpFacts, match_results
from amanda.plan import Actions
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import _StopRecomputationError

from ._node_runs import backward_nodes, sequence_number, uninstrumented
from ._ops import GraphExecution, GraphProgram, call_python

if TYPE_CHECKING:
    from ._python_calls import PlaceValues, PythonCall

MAX_WAITING = 128
"""Limit on waiting tensors, whose memory is held until their observers have run."""

_WAITING_NAME = "_amanda_waiting"
_NODE = "CompiledFunctionBackward"
"""Name of the node that AOTAutograd makes for all backward ops of a graph together."""


def can_wait(action: Action) -> bool:
    """Return True for a routine that may be called later than at its op."""
    return action.observer and not (action.takes_run or action.takes_shapes or action.opening)


class WaitingObservers:
    """Observers in one trace of a graph, with the values that wait for them."""

    def __init__(self, program: GraphProgram) -> None:
        self._program = program
        self._members: list[tuple[int, PlaceValues]] = []  # slots of observers, and their values
        self._count = 0  # of waiting tensors

    @classmethod
    def of_token(cls, program: GraphProgram, token: torch.Tensor) -> WaitingObservers:
        """Return the waiting observers of the trace that a token stands for."""
        waiting: WaitingObservers | None = getattr(token, _WAITING_NAME, None)
        if waiting is None:
            waiting = cls(program)
            setattr(token, _WAITING_NAME, waiting)
        return waiting

    def add(self, token: torch.Tensor, slot: int, values: PlaceValues, is_backward: bool) -> None:
        """Make the observer at a slot wait with its values, at most until the end of a backward pass."""
        if is_backward and not self._members:
            # Values of a backward pass must not wait beyond it: there may be no later call.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.hand_over(token))
        self._members.append((slot, values))
        self._count += len(values.flat)
        if self._count >= MAX_WAITING:
            self.hand_over(token)

    def hand_over(self, token: torch.Tensor) -> None:
        """Insert one call of all waiting observers into the trace."""
        members, self._members, self._count = self._members, [], 0
        if not members:
            return
        program = self._program
        slots = tuple(slot for slot, _ in members)
        counts = [(len(values.flat), len(values.numbers)) for _, values in members]
        # The key has the counts: a backend that traces the graph again may find other numbers of values.
        batch_slot = program.slot(
            ("gathered", slots, tuple(counts)),
            lambda: ObserverBatch([program.table[slot] for slot in slots], counts),
        )
        tensors = [item for _, values in members for item in values.flat]
        numbers = [item for _, values in members for item in values.numbers]
        with uninstrumented():
            call_python("call", token, tensors, numbers, [], program.number, batch_slot)


@dataclass(slots=True)
class _ObserverPlace:
    """One observer at one place."""

    action: Action
    facts: OpFacts


class ObserverBatch:
    """Observers that a graph calls together.

    calls: of the observers, in order.  counts: for each call its numbers of tensors and of numbers.
    """

    def __init__(self, calls: Sequence[PythonCall], counts: Sequence[tuple[int, int]]) -> None:
        """Group the calls by tool and gathered form; observers without such a form are called singly."""
        self._calls = calls
        self._counts = counts
        self._called_singly: list[int] = []
        self._gathered_calls: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            (action,) = call.actions
            if action.gathered is None:
                self._called_singly.append(i)
            else:
                self._gathered_calls.setdefault((action.gathered, id(action.tool)), []).append(i)
        self._prepared_by_group: dict[Any, dict[Any, Any]] = {key: {} for key in self._gathered_calls}

    def store_numbers(self, values: Sequence[Any], numbers: Sequence[int]) -> list[Sequence[Any]]:
        """Return the tensors of each observer, and store the numbers of a run in the calls."""
        tensors_by_call, start, number_start = [], 0, 0
        for call, (tensor_count, number_count) in zip(self._calls, self._counts, strict=True):
            tensors_by_call.append(
                call.store_numbers(
                    values[start : start + tensor_count], numbers[number_start : number_start + number_count]
                )
            )
            start, number_start = start + tensor_count, number_start + number_count
        return tensors_by_call

    def run(self, execution: GraphExecution, flat: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the observers whose tools' scopes are open; those with a gathered form after the others."""
        for i in self._called_singly:
            self._calls[i].run(execution, flat[i])
        for key, members in self._gathered_calls.items():
            (action,) = self._calls[members[0]].actions
            if execution.runs_action(action):
                observed = [self._observed(self._calls[i], flat[i]) for i in members]
                Executions(observed, prepared=self._prepared_by_group[key]).observe(action)
        return []

    @staticmethod
    def _observed(call: PythonCall, flat: Sequence[Any]) -> Observed:
        (action,) = call.actions
        values = call.unflatten([tensor.detach() for tensor in flat])
        return Observed(values, action.kwargs, _ObserverPlace(action, call.facts), _no_run)


def _no_run(place: Any) -> dict[Any, Any]:
    """Return the empty `run` of an execution: an observer that takes `run` does not wait."""
    return {}


class LateObservers:
    """Observers of no value, at the ops and backward ops of a graph that AOTAutograd compiles.

    Compiled code runs all ops of the graph, and later all backward ops from its outputs to its inputs, so
    observers that see no value can be called after it.
    """

    def __init__(self, program: GraphProgram) -> None:
        self._program = program
        self._forward: list[tuple[Action, OpFacts]] = []
        self._backward: list[tuple[Action, OpFacts]] = []

    def __bool__(self) -> bool:
        return bool(self._forward or self._backward)

    def take_over(self, actions: Actions, facts: OpFacts, is_run: bool = True) -> Actions:
        """Take over observers of no value, and return the actions that remain for the graph.

        An observer stays where its tool has another routine at the op.
        is_run: whether the compiled code runs the op.
        """
        tools_with_others = {
            id(action.tool) for action in actions.all if not can_wait(action) or action.select != ()
        }
        late_actions = [action for action in actions.all if id(action.tool) not in tools_with_others]
        if not late_actions:
            return actions
        if is_run:
            observers = self._forward if facts.backward_op_id is None else self._backward
            observers += [(action, facts) for action in late_actions]
        remaining = Actions()
        remaining.add(action for action in actions.all if action not in late_actions)
        return remaining

    def run(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the compiled graph, then call the observers, and return the outputs of the graph.

        Observers of backward ops are called in the backward pass.
        """
        execution = GraphExecution(self._program)
        # Autograd's nodes from this number on are the graph's.
        first_number = sequence_number()
        try:
            with interceptor.Suspension():
                outputs = compiled(*args)
        except _StopRecomputationError:  # a checkpoint stops the recomputation early, but the graph has run
            self._call_observers(self._forward, execution)
            raise
        self._call_observers(self._forward, execution)
        if self._backward:
            self._call_after_backward(outputs, args, first_number, execution)
        return outputs

    def _call_after_backward(
        self, outputs: Any, args: Sequence[Any], first_number: int, execution: GraphExecution
    ) -> None:
        """Hook the node of the compiled backward pass to call the observers of backward ops."""
        tensors = [leaf for leaf in tree_flatten((outputs, args))[0] if isinstance(leaf, torch.Tensor)]
        nodes = [node for node, _ in backward_nodes(tensors, first_number, sequence_number())]
        # One hook at the node for all backward ops of the graph: they run together.
        graph_node = next((node for node in nodes if type(node).__name__ == _NODE), None)
        if graph_node is not None:
            graph_node.register_hook(lambda *_: self._call_observers(self._backward, execution))
        elif nodes:
            subject, reason = "backward ops of a compiled graph", "autograd runs them one by one, unobserved"
            execution.state.report(subject, reason)

    @staticmethod
    def _call_observers(observers: Iterable[tuple[Action, OpFacts]], execution: GraphExecution) -> None:
        """Call the observers whose tools' scopes are open; a hot path."""
        runs: dict[int, bool] = {}
        with interceptor.Suspension(), torch.no_grad():
            for action, facts in observers:
                tool = id(action.tool)
                if tool not in runs:
                    runs[tool] = execution.runs_action(action)
                if runs[tool]:
                    try:
                        with action.tool._amanda.lock:  # a tool's routines run on one thread at a time
                            result = action.func(**action.kwargs)
                        if result is not None:
                            match_results(action, result, ())
                    except BaseException as error:
                        facts.annotate_error(error, action)
                        raise

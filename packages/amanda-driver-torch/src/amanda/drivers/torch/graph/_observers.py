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
_COMPILED_BACKWARD_NODE = "CompiledFunctionBackward"
"""Name of the node that AOTAutograd makes for all backward ops of a graph together."""


def can_wait(action: Action) -> bool:
    """Return True for a routine that may be called later than at its op."""
    return action.observer and not (action.takes_run or action.takes_shapes or action.opening)


class WaitingObservers:
    """Observers in one trace of a graph, whose values wait until one call of Python hands all of them over.

    A token stands for the trace, as it does for an execution of the graph.
    """

    def __init__(self, program: GraphProgram) -> None:
        self._program = program
        self._slots_and_values: list[tuple[int, PlaceValues]] = []
        self._tensor_count = 0

    @classmethod
    def of_token(cls, program: GraphProgram, token: torch.Tensor) -> WaitingObservers:
        """Return the waiting observers of the trace that a token stands for; made at the first call."""
        waiting: WaitingObservers | None = getattr(token, _WAITING_NAME, None)
        if waiting is None:
            waiting = cls(program)
            setattr(token, _WAITING_NAME, waiting)
        return waiting

    def add(self, token: torch.Tensor, slot: int, values: PlaceValues, is_backward: bool) -> None:
        """Make the observer at a slot wait with its values, at most until the end of a backward pass.

        All are called at once if too many tensors wait.
        """
        if is_backward and not self._slots_and_values:
            # Values of a backward pass must not wait beyond it: there may be no later call.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.hand_over(token))
        self._slots_and_values.append((slot, values))
        self._tensor_count += len(values.flat)
        if self._tensor_count >= MAX_WAITING:
            self.hand_over(token)

    def hand_over(self, token: torch.Tensor) -> None:
        """Insert one call of all waiting observers into the trace; none if no observer waits."""
        slots_and_values, self._slots_and_values, self._tensor_count = self._slots_and_values, [], 0
        if not slots_and_values:
            return
        program = self._program
        slots = tuple(slot for slot, _ in slots_and_values)
        counts = [(len(values.flat), len(values.numbers)) for _, values in slots_and_values]
        # The key has the counts: a backend that traces the graph again may find other numbers of values.
        batch_slot = program.slot_of(
            ("gathered", slots, tuple(counts)),
            lambda: ObserverBatch([program.table[slot] for slot in slots], counts),
        )
        tensors = [tensor for _, values in slots_and_values for tensor in values.flat]
        numbers = [number for _, values in slots_and_values for number in values.numbers]
        with uninstrumented():
            call_python("call", token, tensors, numbers, [], program.number, batch_slot)


@dataclass(slots=True)
class _ObserverPlace:
    """One observer at one place."""

    action: Action
    facts: OpFacts


class ObserverBatch:
    """Observers that a graph calls together, by one call of Python with the values of all.

    calls: of the observers, in order.  counts: for each call, how many tensors and how many numbers it gets.
    A gathered form is a routine of the tool that takes the values of many observers at once.
    """

    def __init__(self, calls: Sequence[PythonCall], counts: Sequence[tuple[int, int]]) -> None:
        """Group the calls by tool and gathered form; observers without such a form are called one by one."""
        self._calls = calls
        self._counts = counts
        self._indices_without_gathered_form: list[int] = []
        self._indices_by_group: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            (action,) = call.actions
            if action.gathered is None:
                self._indices_without_gathered_form.append(i)
            else:
                self._indices_by_group.setdefault((action.gathered, id(action.tool)), []).append(i)
        self._prepared_by_group: dict[Any, dict[Any, Any]] = {key: {} for key in self._indices_by_group}

    def store_numbers(self, values: Sequence[Any], numbers: Sequence[int]) -> list[Sequence[Any]]:
        """Return the tensors of each observer, and store the numbers of a run in the calls.

        values: tensors for all calls in order, and the floats among the numbers.  numbers: integers for all.
        """
        tensors_by_call = []
        tensor_start = number_start = 0
        for call, (tensor_count, number_count) in zip(self._calls, self._counts, strict=True):
            tensor_end, number_end = tensor_start + tensor_count, number_start + number_count
            tensors_of_call, numbers_of_call = (
                values[tensor_start:tensor_end],
                numbers[number_start:number_end],
            )
            tensors_by_call.append(call.store_numbers(tensors_of_call, numbers_of_call))
            tensor_start, number_start = tensor_end, number_end
        return tensors_by_call

    def run(self, execution: GraphExecution, flat: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the observers whose tools' scopes are open, those with a gathered form last; return []."""
        for i in self._indices_without_gathered_form:
            self._calls[i].run(execution, flat[i])
        for group, indices in self._indices_by_group.items():
            (action,) = self._calls[indices[0]].actions
            if execution.runs_action(action):
                observed = [self._observed(self._calls[i], flat[i]) for i in indices]
                Executions(observed, prepared=self._prepared_by_group[group]).observe(action)
        return []

    @staticmethod
    def _observed(call: PythonCall, flat: Sequence[Any]) -> Observed:
        """Return the detached values of a call with its arguments and place, for the gathered form."""
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
        """Take observers of no value from an op's actions, and return the actions that remain for the graph.

        An observer stays where its tool has another routine at the op.
        is_run: whether the compiled code runs the op; observers of an op that it leaves out are dropped.
        """
        ids_of_tools_with_other_routines = {
            id(action.tool) for action in actions.all if not can_wait(action) or action.select != ()
        }
        late_actions = [
            action for action in actions.all if id(action.tool) not in ids_of_tools_with_other_routines
        ]
        if not late_actions:
            return actions
        if is_run:
            observers = self._forward if facts.backward_op_id is None else self._backward
            observers += [(action, facts) for action in late_actions]
        remaining_actions = Actions()
        remaining_actions.add(action for action in actions.all if action not in late_actions)
        return remaining_actions

    def run(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the compiled graph, then call the observers, and return the outputs of the graph.

        Observers of backward ops are called in the backward pass.
        """
        execution = GraphExecution(self._program)
        first_number = sequence_number()  # of autograd's nodes that the graph makes
        try:
            with interceptor.Suspension():
                outputs = compiled(*args)
        except _StopRecomputationError:  # a checkpoint stops the recomputation early, but the graph has run
            self._call_observers(self._forward, execution)
            raise  # for the checkpoint
        self._call_observers(self._forward, execution)
        if self._backward:
            self._call_after_backward(outputs, args, first_number, execution)
        return outputs

    def _call_after_backward(
        self, outputs: Any, args: Sequence[Any], first_number: int, execution: GraphExecution
    ) -> None:
        """Hook the node of the compiled backward pass to call the observers of backward ops.

        If autograd has made other nodes instead, it is reported that they go unobserved.
        first_number: the sequence number of the run's first node.
        """
        tensors = [leaf for leaf in tree_flatten((outputs, args))[0] if isinstance(leaf, torch.Tensor)]
        nodes = [node for node, _ in backward_nodes(tensors, first_number, sequence_number())]
        compiled_node = next((node for node in nodes if type(node).__name__ == _COMPILED_BACKWARD_NODE), None)
        if compiled_node is not None:
            compiled_node.register_hook(lambda *_: self._call_observers(self._backward, execution))
        elif nodes:
            subject, reason = "backward ops of a compiled graph", "autograd runs them one by one, unobserved"
            execution.state.report(subject, reason)

    @staticmethod
    def _call_observers(observers: Iterable[tuple[Action, OpFacts]], execution: GraphExecution) -> None:
        """Call the observers whose tools' scopes are open; their errors get a note of the op; a hot path.

        Raises RoutineError for one that returns values.
        """
        is_open_by_tool_id: dict[int, bool] = {}
        with interceptor.Suspension(), torch.no_grad():
            for action, facts in observers:
                tool_id = id(action.tool)
                if tool_id not in is_open_by_tool_id:
                    is_open_by_tool_id[tool_id] = execution.runs_action(action)
                if is_open_by_tool_id[tool_id]:
                    try:
                        with action.tool._amanda.lock:  # a tool's routines run on one thread at a time
                            result = action.func(**action.kwargs)
                        if result is not None:
                            match_results(action, result, ())
                    except BaseException as error:
                        facts.annotate_error(error, action)
                        raise

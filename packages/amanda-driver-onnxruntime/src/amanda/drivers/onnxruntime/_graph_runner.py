"""Execution of a rewritten graph in steps: sessions run nodes, and Python the routines between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onnx import NodeProto

from amanda import interceptor
from amanda.backend import Execution

from ._control_flow import ControlFlowBody, ControlFlowNode, RunnableControlFlow
from ._items import ComputedNode, GraphItem, RoutineCall
from ._sessions import PartSession, SessionFactory
from ._values import OnnxSymbol, as_array, names_read


class _RunnableStep(NamedTuple):
    """Routines and control flow, then a session, if any; and the names of values that nothing reads later."""

    calls: Sequence[RoutineCall | RunnableControlFlow]
    session: PartSession | None
    names_to_drop: Sequence[str]


class GraphRunner:
    """Runs a graph, the outermost one or a body, step by step.

    items: the rewritten graph, in order.  symbol: returns the symbol of a value.
    constants: values of constants by name.  constant_names: names of the constants that sessions hold.
    fetched: names of the values that the graph returns.
    extents_vary: True if extents may differ from the model's, as in the rounds of a loop.
    """

    def __init__(
        self,
        sessions: SessionFactory,
        items: Iterable[GraphItem],
        constants: Mapping[str, Any],
        constant_names: Collection[str],
        fetched: Collection[str],
        symbol: Callable[[str], OnnxSymbol],
        extents_vary: bool,
    ) -> None:
        self._sessions, self._constants, self._constant_names = sessions, constants, constant_names
        steps = schedule(items, constant_names, set(fetched), lambda name: symbol(name).nbytes)
        self._steps: list[_RunnableStep] = []
        for step in steps:
            # Nodes have no effects, so a step whose outputs nobody reads needs no session.
            session = sessions.part_session(step, symbol, constants, extents_vary) if step.outputs else None
            calls = [
                RunnableControlFlow(call, self._body_runner) if isinstance(call, ControlFlowNode) else call
                for call in step.calls
            ]
            names_to_drop = [name for name in step.names_to_drop if name not in constant_names]
            self._steps.append(_RunnableStep(calls, session, names_to_drop))
        names_in_calls = {name for step in steps for call in step.calls for name in call.reads}
        names_read_in_python = ((names_in_calls & constants.keys()) | {*fetched}) & {*constant_names}
        self._constants_read_in_python = {name: constants[name] for name in names_read_in_python}

    def _body_runner(self, body: ControlFlowBody) -> GraphRunner:
        """Return the runner of a body; its inputs hide constants of the same name."""
        input_names = {symbol.name for symbol in body.inputs}
        constants = {**self._constants, **body.constants}
        constants = {name: array for name, array in constants.items() if name not in input_names}
        constant_names = ({*self._constant_names} | body.constants.keys()) - input_names
        return GraphRunner(
            self._sessions, body.items, constants, constant_names, body.outputs, body.symbol,
            extents_vary=True,
        )  # fmt: skip

    def run(
        self,
        execution: Execution,
        values: Mapping[str, Any],
        names: Sequence[str],
        options: Any,
        rounds: Sequence[int] = (),
    ) -> list[Any]:
        """Run the graph; return the values of these names.

        values: the inputs of the graph, and values of graphs around that it reads.
        rounds: of the loops around the graph.
        """
        # By name, those that a later step still reads.
        present_values = {**self._constants_read_in_python, **values}
        for step in self._steps:
            for call in step.calls:
                if isinstance(call, RunnableControlFlow):
                    results = call.run(execution, present_values, options, rounds)
                else:
                    arrays = [as_array(present_values[name]) for name in call.reads]
                    results = execution.call(call.slot, arrays, rounds)
                present_values.update(zip(call.outputs, results, strict=True))
            if step.session is not None:
                with interceptor.Suspension():
                    present_values.update(step.session.run(present_values, options))
            for name in step.names_to_drop:
                # Arrays are freed as soon as no later step reads them, as a session would free them.
                present_values.pop(name, None)
        return [present_values[name] for name in names]


BUDGET = 256 << 20
"""Limit in bytes for the values that a session outputs for observers."""


@dataclass
class ScheduledStep:
    """Routines and control flow, and then the nodes of a session.

    inputs, outputs, constants: names of the session's values.
    names_to_drop: of values that nothing reads after this step.
    """

    calls: list[RoutineCall | ControlFlowNode] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    names_to_drop: list[str] = field(default_factory=list)


def schedule(
    items: Iterable[GraphItem],
    constants: Collection[str],
    fetched: Collection[str],
    nbytes: Callable[[str], int] = lambda name: 0,
    budget: int = BUDGET,
) -> list[ScheduledStep]:
    """Return the steps in which items run.

    A node runs in the first session that has its inputs; a routine ahead of the first session before which
    its inputs are computed.  So a session ends where a value is read that a routine changes, and observers
    wait for the end of a session, up to a budget.
    constants: names of values that each session may hold.  fetched: names of values that the graph returns.
    nbytes: returns the size of a value.
    """
    steps: defaultdict[int, ScheduledStep] = defaultdict(ScheduledStep)
    # By a value's name, the number of the first step whose session, or whose routines, can read the value.
    session_step: dict[str, int] = {}
    python_step: dict[str, int] = {}
    observed_nbytes: defaultdict[int, int] = defaultdict(int)  # by the number of a step
    earliest_number = 0  # the first step that nodes may still be added to
    for item in items:
        if isinstance(item, ComputedNode):
            first_number = max((session_step.get(name, 0) for name in names_read(item.node)), default=0)
            # Not before the observers have run whose values exceed the budget.
            number = max(first_number, earliest_number)
            steps[number].nodes.append(item.node)
            for name in item.node.output:
                session_step[name], python_step[name] = number, number + 1
            continue
        assert isinstance(item, (RoutineCall, ControlFlowNode))
        number = max((python_step.get(name, 0) for name in (*item.reads, *item.waits_for)), default=0)
        steps[number].calls.append(item)
        # The routines of a step run in order, and ahead of its session.
        for name in item.outputs:
            session_step[name] = python_step[name] = number
        # Routines with results end a session anyway; values for observers alone pile up until it ends.
        observed_nbytes[number] += 0 if item.outputs else sum(nbytes(name) for name in item.reads)
        if observed_nbytes[number] > budget:
            # Later nodes go to later sessions, so that observers run, and the values they keep are freed.
            earliest_number = max(earliest_number, number)
    ordered_steps = [steps[number] for number in sorted(steps)]
    _set_passed_values(ordered_steps, constants, fetched)
    return ordered_steps


def _set_passed_values(
    steps: Sequence[ScheduledStep], constants: Collection[str], fetched: Collection[str]
) -> None:
    """Set each step's inputs, outputs, constants and values that nothing reads later."""
    read_later = set(fetched)
    # From the last step back, since an output is needed only if a later step reads it.
    for step in reversed(steps):
        computed_names = {name for node in step.nodes for name in node.output}
        session_reads = dict.fromkeys(
            name for node in step.nodes for name in names_read(node) if name not in computed_names
        )
        step.outputs = [name for name in dict.fromkeys(_output_names(step.nodes)) if name in read_later]
        step.constants = [name for name in session_reads if name in constants]
        step.inputs = [name for name in session_reads if name not in constants]
        read_here = {*step.inputs, *(name for call in step.calls for name in call.reads)}
        step.names_to_drop = sorted(read_here - read_later)
        read_later |= read_here


def _output_names(nodes: Iterable[NodeProto]) -> Iterable[str]:
    return (name for node in nodes for name in node.output if name)

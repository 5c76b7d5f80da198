"""Execution of a rewritten graph in steps: sessions run nodes, and Python the routines between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import NodeProto

from amanda import interceptor
from amanda.backend import Execution

from ._control_flow import ControlFlowBody, ControlFlowNode, RunnableControlFlow
from ._items import ComputedNode, GraphItem, RoutineCall
from ._sessions import PartSession, SessionFactory
from ._values import OnnxSymbol, as_array, names_read


class GraphRunner:
    """Runs a graph, the outermost one or a body, step by step.

    constants: values of constants by name.  constant_names: names of the constants that sessions hold.
    fetched: names of the values that the graph returns.
    free: True if extents may differ from the model's, as in the rounds of a loop.
    """

    def __init__(
        self,
        sessions: SessionFactory,
        items: Iterable[GraphItem],
        constants: Mapping[str, Any],
        constant_names: Collection[str],
        fetched: Collection[str],
        symbol: Callable[[str], OnnxSymbol],
        free: bool,
    ) -> None:
        self._sessions, self._constants, self._constant_names = sessions, constants, constant_names
        steps = schedule(items, constant_names, set(fetched), lambda name: symbol(name).nbytes)
        self._steps: list[tuple[list[RoutineCall | RunnableControlFlow], PartSession | None, list[str]]] = []
        for step in steps:
            # Nodes have no effects, so a step whose outputs nobody reads needs no session.
            part = sessions.part_session(step, symbol, constants, free) if step.outputs else None
            calls = [
                self._runnable(call) if isinstance(call, ControlFlowNode) else call for call in step.calls
            ]
            self._steps.append((calls, part, [name for name in step.done if name not in constant_names]))
        read_by_calls = {name for step in steps for call in step.calls for name in call.reads}
        self.read = read_by_calls & constants.keys()
        self._defaults = {name: constants[name] for name in (self.read | {*fetched}) & {*constant_names}}

    def _runnable(self, flow: ControlFlowNode) -> RunnableControlFlow:
        return RunnableControlFlow(flow, self._body_runner)

    def _body_runner(self, body: ControlFlowBody) -> GraphRunner:
        """Return the runner of a body; its inputs hide constants of the same name."""
        constants = {**self._constants, **body.constants}
        for symbol in body.inputs:
            constants.pop(symbol.name, None)
        constant_names = ({*self._constant_names} | body.constants.keys()) - {
            symbol.name for symbol in body.inputs
        }
        return GraphRunner(
            self._sessions, body.items, constants, constant_names, body.outputs, body.symbol, free=True
        )

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
        """
        present = {**self._defaults, **values}
        for calls, part, done in self._steps:
            for call in calls:
                if isinstance(call, RunnableControlFlow):
                    results = call.run(execution, present, options, rounds)
                else:
                    arrays = [as_array(present[name]) for name in call.reads]
                    results = execution.call(call.slot, arrays, rounds)
                present.update(zip(call.outputs, results, strict=True))
            if part is not None:
                with interceptor.Suspension():
                    present.update(part.run(present, options))
            for name in done:
                # Arrays are freed as soon as no later step reads them, as a session would free them.
                present.pop(name, None)
        return [present[name] for name in names]


BUDGET = 256 << 20
"""Limit in bytes for the values that a session outputs for observers."""


@dataclass
class ScheduledStep:
    """Routines and control flow, and then the nodes of a session.

    inputs, outputs, constants: names of the session's values.
    done: names of values that nothing reads after this step.
    """

    calls: list[RoutineCall | ControlFlowNode] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


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
    in_session: dict[str, int] = {}  # the first step whose session can read a value
    in_python: dict[str, int] = {}  # the first step whose routines can read a value
    observed_nbytes: defaultdict[int, int] = defaultdict(int)
    first_number = 0
    for item in items:
        if isinstance(item, ComputedNode):
            number = max((in_session.get(name, 0) for name in names_read(item.node)), default=0)
            # Not before the observers have run whose values exceed the budget.
            number = max(number, first_number)
            steps[number].nodes.append(item.node)
            in_session.update(dict.fromkeys(item.node.output, number))
            in_python.update(dict.fromkeys(item.node.output, number + 1))
            continue
        assert isinstance(item, (RoutineCall, ControlFlowNode))
        number = max((in_python.get(name, 0) for name in (*item.reads, *item.waits_for)), default=0)
        steps[number].calls.append(item)
        in_session.update(dict.fromkeys(item.outputs, number))
        in_python.update(dict.fromkeys(item.outputs, number))
        # Routines with results end a session anyway; values for observers alone pile up until it ends.
        observed_nbytes[number] += 0 if item.outputs else sum(nbytes(name) for name in item.reads)
        if observed_nbytes[number] > budget:
            # Later nodes go to later sessions, so that observers run, and the values they keep are freed.
            first_number = max(first_number, number)
    ordered = [steps[number] for number in sorted(steps)]
    _find_passed_values(ordered, constants, fetched)
    return ordered


def _find_passed_values(
    steps: Sequence[ScheduledStep], constants: Collection[str], fetched: Collection[str]
) -> None:
    """Find the values that pass between the steps."""
    read_later = set(fetched)
    # From the last step back, since an output is needed only if a later step reads it.
    for step in reversed(steps):
        computed = {name for node in step.nodes for name in node.output}
        read = dict.fromkeys(name for node in step.nodes for name in names_read(node) if name not in computed)
        step.outputs = [name for name in dict.fromkeys(_output_names(step.nodes)) if name in read_later]
        step.constants = [name for name in read if name in constants]
        step.inputs = [name for name in read if name not in constants]
        read_here = {*step.inputs, *(name for call in step.calls for name in call.reads)}
        step.done = sorted(read_here - read_later)
        read_later |= read_here


def _output_names(nodes: Iterable[NodeProto]) -> Iterable[str]:
    return (name for node in nodes for name in node.output if name)

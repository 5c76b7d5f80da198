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
    """Routines and control flow, then a session, if any; `done` names values that nothing reads later."""

    calls: Sequence[RoutineCall | RunnableControlFlow]
    session: PartSession | None
    done: Sequence[str]


class GraphRunner:
    """Runs a graph, the outermost one or a body, step by step.

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
            done = [name for name in step.done if name not in constant_names]
            self._steps.append(_RunnableStep(calls, session, done))
        read_by_calls = {name for step in steps for call in step.calls for name in call.reads}
        read_in_python = (read_by_calls & constants.keys()) | {*fetched}
        self._defaults = {name: constants[name] for name in read_in_python & {*constant_names}}

    def _body_runner(self, body: ControlFlowBody) -> GraphRunner:
        """Return the runner of a body; its inputs hide constants of the same name."""
        constants = {**self._constants, **body.constants}
        for symbol in body.inputs:
            constants.pop(symbol.name, None)
        constant_names = ({*self._constant_names} | body.constants.keys()) - {
            symbol.name for symbol in body.inputs
        }
        return GraphRunner(
            self._sessions,
            body.items,
            constants,
            constant_names,
            body.outputs,
            body.symbol,
            extents_vary=True,
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
        present_values = {**self._defaults, **values}
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
            for name in step.done:
                # Arrays are freed as soon as no later step reads them, as a session would free them.
                present_values.pop(name, None)
        return [present_values[name] for name in names]


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
    earliest_number = 0  # the first step that nodes may still be added to
    for item in items:
        if isinstance(item, ComputedNode):
            first_number = max((in_session.get(name, 0) for name in names_read(item.node)), default=0)
            # Not before the observers have run whose values exceed the budget.
            number = max(first_number, earliest_number)
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
            earliest_number = max(earliest_number, number)
    ordered = [steps[number] for number in sorted(steps)]
    _set_passed_values(ordered, constants, fetched)
    return ordered


def _set_passed_values(
    steps: Sequence[ScheduledStep], constants: Collection[str], fetched: Collection[str]
) -> None:
    """Set each step's inputs, outputs, constants and values that nothing reads later."""
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

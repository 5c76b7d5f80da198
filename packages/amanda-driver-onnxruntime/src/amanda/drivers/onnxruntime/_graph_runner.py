"""Execution of a rewritten graph: sessions run the nodes, Python the routines and control flow between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from amanda import interceptor
from amanda.backend import Execution

from ._control_flow import ControlFlowBody, ControlFlowNode, RunnableControlFlow
from ._items import GraphItem, RoutineCall
from ._schedule import schedule
from ._sessions import PartSession, SessionFactory
from ._symbols import Symbol
from ._values import as_array


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
        symbol: Callable[[str], Symbol],
        free: bool,
    ) -> None:
        self._sessions, self._constants, self._constant_names = sessions, constants, constant_names
        steps = schedule(items, constant_names, set(fetched), lambda name: symbol(name).nbytes)
        self._steps: list[tuple[list[RoutineCall | RunnableControlFlow], PartSession | None, list[str]]] = []
        for step in steps:
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

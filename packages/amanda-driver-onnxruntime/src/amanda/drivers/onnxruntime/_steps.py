"""A rewritten graph as it runs: sessions of the nodes, and between them routines and control flow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from amanda import interceptor
from amanda.backend import Execution

from ._control_flow import Body, Flow, RunnableFlow
from ._places import Call, Item
from ._schedule import schedule
from ._sessions import Part, Sessions
from ._symbols import Symbol
from ._values import as_array


class Steps:
    """The sessions of one graph, the outermost one or that of a body, and what runs between them.

    constants: values that sessions hold, by name.  fetched: names of the values that the graph gives.
    free: whether extents may be others than the model says, as in the rounds of a loop.
    """

    def __init__(
        self,
        sessions: Sessions,
        items: Iterable[Item],
        constants: Mapping[str, Any],
        held: Collection[str],
        fetched: Collection[str],
        symbol: Callable[[str], Symbol],
        free: bool,
    ) -> None:
        self._sessions, self._constants, self._held = sessions, constants, held
        steps = schedule(items, held, set(fetched), lambda name: symbol(name).nbytes)
        self._steps: list[tuple[list[Call | RunnableFlow], Part | None, list[str]]] = []
        for step in steps:
            part = sessions.part(step, symbol, constants, free) if step.outputs else None
            calls = [self._runnable(call) if isinstance(call, Flow) else call for call in step.calls]
            self._steps.append((calls, part, [name for name in step.done if name not in held]))
        read = {name for step in steps for call in step.calls for name in call.reads}
        self.read = read & constants.keys()
        self._defaults = {name: constants[name] for name in (self.read & {*held}) | ({*fetched} & {*held})}

    def _runnable(self, flow: Flow) -> RunnableFlow:
        return RunnableFlow(flow, self._of_body)

    def _of_body(self, body: Body) -> Steps:
        constants = {**self._constants, **body.constants}
        for symbol in body.inputs:
            constants.pop(symbol.name, None)
        held = ({*self._held} | body.constants.keys()) - {symbol.name for symbol in body.inputs}
        return Steps(self._sessions, body.items, constants, held, body.outputs, body.symbol, free=True)

    def run(
        self,
        execution: Execution,
        values: Mapping[str, Any],
        names: Sequence[str],
        options: Any,
        rounds: Sequence[int] = (),
    ) -> list[Any]:
        """Return the values of these names.  values: what the graph is given, and those of graphs around."""
        present = {**self._defaults, **values}
        for calls, part, done in self._steps:
            for call in calls:
                if isinstance(call, RunnableFlow):
                    results = call.run(execution, present, options, rounds)
                else:
                    given = [as_array(present[name]) for name in call.reads]
                    results = execution.call(call.slot, given, rounds)
                present.update(zip(call.gives, results, strict=True))
            if part is not None:
                with interceptor.Suspension():
                    present.update(part.run(present, options))
            for name in done:
                present.pop(name, None)
        return [present[name] for name in names]

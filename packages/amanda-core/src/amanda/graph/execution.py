"""One run of a rewritten graph, which calls routines by the number of its execution."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.graph.insertion import Insertion, RoutineTable
from amanda.plan.facts import explain_errors
from amanda.scope.caller import caller, serving

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps
    from amanda.scope.state import State

RunsByOp = dict[tuple[int, tuple[int, ...]], dict[str, Any]]


class _ExecutionNumbers:
    """Numbers of executions, reused some time after an execution has ended.

    Frameworks cache a tensor for each number that they have seen, so numbers have to stay few.
    """

    _LATELY = 64

    def __init__(self) -> None:
        self._unused = count(1)
        self._retired: deque[int] = deque()

    def take(self) -> int:
        """Return a number that no living execution has."""
        if len(self._retired) > self._LATELY:
            with suppress(IndexError):  # another thread has taken the last one
                return self._retired.popleft()
        return next(self._unused)

    def give_back(self, number: int) -> None:
        """Take back the number of an execution that has ended."""
        self._retired.append(number)


class Execution:
    """One run of a rewritten graph: the routines that it calls, their shared dicts, their first exception.

    table: the routines by slot.
    runs: dicts `run` of the routines at an op, by forward op id and the rounds of the loops around the op.
    stores: values of a forward pass for its backward pass, by the place that stored them and the rounds of
    the loops around it; in a loop without known rounds a list with a value for each round.
    """

    _numbers = _ExecutionNumbers()
    _running: dict[int, Execution] = {}  # noqa: RUF012

    def __init__(
        self,
        state: State,
        ops: TensorOps,
        table: Mapping[int, Insertion],
        runs: RunsByOp | None = None,
        every: bool = True,
        stores: dict[Hashable, list[Any]] | None = None,
    ) -> None:
        self.number = self._numbers.take()
        self.state = state
        self.ops = ops
        self.table = table
        self.runs: RunsByOp = {} if runs is None else runs
        self.stores: dict[Hashable, list[Any]] = {} if stores is None else stores
        self._remaining: dict[Any, int] = {}
        self.error: BaseException | None = None
        self._every = every
        self._caller = caller()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if "number" in vars(self):  # missing if a signal's handler has raised in __init__
            self._numbers.give_back(self.number)

    @classmethod
    def of(cls, number: int) -> Execution:
        """Return the execution under way with this number."""
        return cls._running[number]

    def store(self, place: Hashable, entry: Any) -> None:
        """Store a value for the backward pass."""
        self.stores.setdefault(place, []).append(entry)

    def stored_value(self, place: Hashable, reader: Any) -> Any:
        """Return a value that a place has stored: each reader gets the last value first, then earlier ones.

        The gradient of a loop runs the rounds in reverse.
        """
        entries = self.stores[place]
        index = self._remaining[reader, place] = max(
            self._remaining.get((reader, place), len(entries)) - 1, 0
        )
        return entries[index]

    def runs_action(self, action: Action) -> bool:
        """Return True if a scope with the action's tool is open for this execution."""
        return not action.opening and (self._every or self.state.is_open(action.tool))

    def begin(self) -> None:
        """Call the opening routines; allow the graph to call back from now on."""
        self._call_openings()
        self._running[self.number] = self

    def end(self) -> None:
        """Forbid the graph to call back."""
        self._running.pop(self.number, None)

    @contextmanager
    def under_way(self) -> Iterator[Execution]:
        """Return a context in which the graph may call back; it raises the first exception of a routine."""
        self.begin()
        try:
            with self.part():
                yield self
        finally:
            self.end()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Return a context for a part between `begin` and `end`; it raises a routine's exception itself."""
        # The framework wraps a routine's exception in its own error; raise the routine's exception instead.
        try:
            yield
        except BaseException:
            if self.error is None:
                raise
        if self.error is not None:
            error, self.error = self.error, None
            raise error from error.__cause__

    def _call_openings(self) -> None:
        for action, facts in self.table.openings if isinstance(self.table, RoutineTable) else ():
            if self._every or self.state.is_open(action.tool):
                with explain_errors(facts, action.tool, str(action)), action.tool._amanda.lock:
                    action.func(**action.kwargs)

    def call(self, slot: int, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines of a slot; return the tensors that go back into the graph.

        rounds: number of the round of each loop around the place, the outermost loop first.
        """
        try:
            with interceptor.Suspension(), serving(self._caller):
                return self.table[slot].run(self, flat, rounds)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
            raise

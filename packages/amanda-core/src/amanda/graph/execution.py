"""One run of a rewritten graph, which calls back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.graph.insertion import Insertion, Table
from amanda.plan.notes import explain_errors
from amanda.scope.caller import caller, serving

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps
    from amanda.scope.state import State

Runs = dict[tuple[int, tuple[int, ...]], dict[str, Any]]


class _Numbers:
    """Numbers of executions, which are given again when an execution is long gone.

    Frameworks keep a tensor for each number that they have met.
    """

    _LATELY = 64

    def __init__(self) -> None:
        self._fresh = count(1)
        self._gone: deque[int] = deque()

    def take(self) -> int:
        """Return a number that no living execution has."""
        if len(self._gone) > self._LATELY:
            with suppress(IndexError):  # another thread was faster
                return self._gone.popleft()
        return next(self._fresh)

    def give_back(self, number: int) -> None:
        """Take back the number of an execution that is gone."""
        self._gone.append(number)


class Execution:
    """One run of a rewritten graph: the routines it calls, what they hand on, and their first exception.

    table: what runs at which slot.
    runs: by forward op id and the rounds of the loops around the op, what its routines hand on from forward
    to backward.
    stores: values that a forward pass keeps for its backward pass, by the place that kept them and the rounds
    of the loops around it; in a loop whose rounds are not told, one for each, asked for in reverse.
    """

    _numbers = _Numbers()
    _running: dict[int, Execution] = {}  # noqa: RUF012

    def __init__(
        self,
        state: State,
        ops: TensorOps,
        table: Mapping[int, Insertion],
        runs: Runs | None = None,
        every: bool = True,
        stores: dict[Hashable, list[Any]] | None = None,
    ) -> None:
        self.number = self._numbers.take()
        self.state = state
        self.ops = ops
        self.table = table
        self.runs: Runs = {} if runs is None else runs
        self.stores: dict[Hashable, list[Any]] = {} if stores is None else stores
        self._left: dict[Any, int] = {}
        self.error: BaseException | None = None
        self._every = every
        self._caller = caller()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if "number" in vars(self):  # a signal's handler may have raised in __init__
            self._numbers.give_back(self.number)

    @classmethod
    def of(cls, number: int) -> Execution:
        """Return the execution under way that has this number."""
        return cls._running[number]

    def keep(self, place: Hashable, entry: Any) -> None:
        """Keep something for the backward pass."""
        self.stores.setdefault(place, []).append(entry)

    def kept(self, place: Hashable, reader: Any) -> Any:
        """Return what a place has kept: to each reader the last first, then those before it."""
        entries = self.stores[place]
        left = self._left[reader, place] = max(self._left.get((reader, place), len(entries)) - 1, 0)
        return entries[left]

    def runs_action(self, action: Action) -> bool:
        """Return True if a scope with the action's tool is open for this execution."""
        return not action.opening and (self._every or self.state.is_open(action.tool))

    def begin(self) -> None:
        """Allow the graph to call back, after the routines that are called as a run begins."""
        self._open()
        self._running[self.number] = self

    def end(self) -> None:
        """Forbid the graph to call back."""
        self._running.pop(self.number, None)

    @contextmanager
    def under_way(self) -> Iterator[Execution]:
        """Allow the graph to call back meanwhile; raise the first exception of a routine as itself."""
        self.begin()
        try:
            with self.part():
                yield self
        finally:
            self.end()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Run a part of what is between `begin` and `end`; raise a routine's exception as itself."""
        try:
            yield
        except BaseException:
            if self.error is None:
                raise
        if self.error is not None:
            error, self.error = self.error, None
            raise error from error.__cause__

    def _open(self) -> None:
        for action, facts in self.table.openings if isinstance(self.table, Table) else ():
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

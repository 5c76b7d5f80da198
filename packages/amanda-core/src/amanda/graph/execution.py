"""Routines at the places of a rewritten graph, and one run of the graph, which calls them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.errors import RoutineError
from amanda.plan.facts import explain_errors
from amanda.plan.routine import run_replacement, run_routine
from amanda.plan.tensors import spread
from amanda.scope.threads import caller, serving

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps
    from amanda.scope.state import State


class Insertion:
    """Routines that run at one place of a rewritten graph, one after another.

    loop_depth: number of loops around the forward op; each round has its own `run`.
    original: computes the op, if it is replaced.
    extra_input_count: number of tensors of other ops, which follow the op's tensors.

    Args:
        actions: Actions in the order in which the routines run.
        facts: Facts of the op.
        value_count: Number of values that the op has at this place.
        input_positions: Positions of the op's values that the routines receive.
        list_lengths: For each received value the length if it is a list; None for a single tensor.
        output_positions: Positions of the values that the routines return to the graph, in order.
    """

    __slots__ = (
        "actions",
        "extra_input_count",
        "facts",
        "input_positions",
        "is_replacement",
        "list_lengths",
        "loop_depth",
        "original",
        "output_positions",
        "takes_run",
        "value_count",
    )  # fmt: skip

    def __init__(
        self,
        actions: Sequence[Action],
        facts: OpFacts,
        value_count: int,
        input_positions: Sequence[int],
        list_lengths: Sequence[int | None],
        output_positions: Sequence[int],
    ) -> None:
        self.actions = tuple(actions)
        self.facts = facts
        self.value_count = value_count
        self.input_positions = tuple(input_positions)
        self.list_lengths = tuple(list_lengths)
        self.output_positions = tuple(output_positions)
        self.loop_depth = 0
        self.original: Callable[[Sequence[Any]], Any] | None = None
        self.extra_input_count = 0
        # Computed once: `run` is called at each execution of the place.
        self.takes_run = any(action.takes_run for action in self.actions)
        self.is_replacement = bool(self.actions) and self.actions[0].type.is_replacement

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Return the op's values from the flat tensors; a list takes as many of these as `list_lengths` says.

        A value that the routines do not receive is None.
        """
        values: list[Any] = [None] * self.value_count
        tensors = iter(flat)
        for position, length in zip(self.input_positions, self.list_lengths, strict=True):
            values[position] = next(tensors) if length is None else [next(tensors) for _ in range(length)]
        return values

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines; return the flat tensors that go back into the graph.

        In a graph of gradients those of a tool without an open scope are left out, except for a replacement.

        Args:
            execution: Run of the graph.
            flat: Flat tensors that the graph passes.
            rounds: Number of the round of each loop around the place, the outermost loop first.
        """
        run = self.run_dict(execution, rounds) if self.takes_run else {}
        if self.is_replacement:
            return self.run_replacement(self.actions[0], execution.ops, flat, run)
        # A graph of gradients may run in a scope with some of the tools of its forward pass.
        actions = [action for action in self.actions if execution.runs_action(action)]
        return self.call_routines(actions, self.unflatten(flat), execution.ops, execution.state, run)

    def run_dict(self, execution: Execution, rounds: Sequence[int]) -> dict[Any, Any]:
        """Return the dict `run` that the routines of one execution of the op share.

        Args:
            execution: Run of the graph.
            rounds: Number of the round of each loop around the place, the outermost loop first.
        """
        # A loop within the forward op's loop adds numbers at the end, which do not tell its rounds apart.
        return execution.run_dicts.setdefault((self.facts.op_id, tuple(rounds[: self.loop_depth])), {})

    def call_routines(
        self, actions: Sequence[Action], values: list[Any], ops: TensorOps, state: State, run: dict[str, Any]
    ) -> list[Any]:
        """Call routines on values; return the flat tensors that go back into the graph.

        Args:
            actions: Actions whose tools have an open scope.
            values: The op's values at this place.
            ops: Primitives of the framework's tensors.
            state: State of the run of the graph.
            run: Dict that the routines of this execution of the op share.
        """
        for action in actions:
            new_values = run_routine(ops, action, values, self.facts, run, state.autodiff)
            if new_values is not values:
                self.check_results(action, values, new_values)
            values = new_values
        return self.flat_results(values)

    def check_results(self, action: Action, before: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError where a routine changed a value that cannot go back into the graph.

        Does nothing unless a subclass overrides it.

        Args:
            action: Action whose routine has run.
            before: The op's values before the routine.
            values: The op's values after the routine.
        """

    def flat_results(self, values: Sequence[Any]) -> list[Any]:
        """Return the flat tensors that go back into the graph, from all the op's values."""
        return spread(values[position] for position in self.output_positions)

    def run_replacement(
        self, action: Action, ops: TensorOps, flat: Sequence[Any], run: dict[str, Any]
    ) -> list[Any]:
        """Call a replacement on the flat tensors; return the flat tensors that go back into the graph.

        Args:
            action: The replacement.
            ops: Primitives of the framework's tensors.
            flat: Flat tensors that the graph passes, those of other ops last.
            run: Dict that the routines of this execution of the op share.

        Raises:
            RoutineError: For another number of results than outputs, and for NotImplemented.
        """
        input_count = len(flat) - self.extra_input_count
        values, reads = self.unflatten(flat[:input_count]), flat[input_count:]
        result = run_replacement(ops, action, values, self.facts, run, original=self.original, reads=reads)
        if result is NotImplemented:
            error = RoutineError(
                f"{action} left the op to itself, which a rewritten graph does not have any more; "
                "let it compute what the op would have"
            )
            raise self.facts.annotate_error(error, action)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        output_count = len(self.output_positions)
        if result is None and not output_count:
            return []
        if any(value is None for value in results):
            error = RoutineError(
                f"{action} returned None where {self.facts.name} gives a tensor; return what the op would"
            )
            raise self.facts.annotate_error(error, action)
        if output_count == 1 and len(results) != 1:
            return results  # one output that is a list
        self.check_count(results, output_count)
        return spread(results)

    def check_count(self, results: Sequence[Any], output_count: int) -> None:
        """Raise RoutineError for another number of results than the op's outputs.

        Args:
            results: What a replacement returned.
            output_count: Number of the op's outputs.
        """
        if len(results) != output_count:
            (action, *_) = self.actions
            noun = "gradients" if action.type.is_backward else "outputs"
            error = RoutineError(
                f"{action} returned {len(results)} {noun}; {self.facts.name} gives {output_count}"
            )
            raise self.facts.annotate_error(error, action)


class RoutineTable(dict[int, Any]):
    """The routines of a rewritten graph by their slot."""

    @cached_property
    def openings(self) -> tuple[tuple[Action, OpFacts], ...]:
        """Return the routines to call once, as a run starts, each with the facts of its op.

        Cached, so read this after the rewrite.
        """
        insertions = [entry for entry in self.values() if isinstance(entry, Insertion)]
        return tuple(
            (action, insertion.facts)
            for insertion in insertions
            for action in insertion.actions
            if action.opening
        )


RunsByOp = dict[tuple[int, tuple[int, ...]], dict[str, Any]]


class _ExecutionNumbers:
    """Numbers of executions, reused some time after an execution has ended.

    Frameworks cache a tensor for each number that they have seen, so numbers have to stay few.
    """

    _MIN_RETIRED = 64

    def __init__(self) -> None:
        self._unused = count(1)
        self._retired: deque[int] = deque()

    def take(self) -> int:
        """Return a number that no living execution has."""
        # Only the oldest of many are used again: a call of a graph that is just ending must not find another
        # execution under its number.
        if len(self._retired) > self._MIN_RETIRED:
            with suppress(IndexError):  # another thread has taken the last one
                return self._retired.popleft()
        return next(self._unused)

    def give_back(self, number: int) -> None:
        """Take back the number of an execution that has ended."""
        self._retired.append(number)


class Execution:
    """One run of a rewritten graph: the routines that it calls, their shared dicts, their first exception.

    error: the first exception of a routine.

    Args:
        state: State of the thread that runs the graph.
        ops: Primitives of the framework's tensors.
        table: Routines by slot.
        run_dicts: Dicts `run` of the routines, by forward op id and the rounds of the loops around; None for
            none yet.
        runs_all_tools: Whether the routines of all tools run; else only those of tools with an open scope.
        stored_values: Values of a forward pass for its backward pass, in lists by the place that stored them
            and the rounds of the loops around it; None for none yet.
    """

    _numbers = _ExecutionNumbers()
    # Of the class: the graph hands over a number, from which any thread has to find the execution.
    _running: dict[int, Execution] = {}  # noqa: RUF012

    def __init__(
        self,
        state: State,
        ops: TensorOps,
        table: Mapping[int, Insertion],
        run_dicts: RunsByOp | None = None,
        runs_all_tools: bool = True,
        stored_values: dict[Hashable, list[Any]] | None = None,
    ) -> None:
        self.number = self._numbers.take()
        self.state = state
        self.ops = ops
        self.table = table
        self.run_dicts: RunsByOp = {} if run_dicts is None else run_dicts
        self.stored_values: dict[Hashable, list[Any]] = {} if stored_values is None else stored_values
        self._unread_counts: dict[Any, int] = {}  # by reader and place; all values if there is no entry
        self.error: BaseException | None = None
        self._runs_all_tools = runs_all_tools
        # The thread that runs the graph; routines are called on threads of the framework.
        self._caller = caller()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if "number" in vars(self):  # missing if a signal's handler has raised in __init__
            self._numbers.give_back(self.number)

    @classmethod
    def by_number(cls, number: int) -> Execution:
        """Return the execution under way with this number."""
        return cls._running[number]

    def store(self, place: Hashable, entry: Any) -> None:
        """Store a value for the backward pass.

        Args:
            place: Key under which the backward pass finds the value.
            entry: The value.
        """
        self.stored_values.setdefault(place, []).append(entry)

    def stored_value(self, place: Hashable, reader: Any) -> Any:
        """Return a value that a place has stored: each reader gets the last value first, then earlier ones.

        The gradient of a loop runs the rounds in reverse.  A reader that has had all gets the first value
        again.

        Args:
            place: Key under which the values were stored.
            reader: Key that tells the readers of one place apart.
        """
        values = self.stored_values[place]
        unread_count = self._unread_counts.get((reader, place), len(values))
        last_unread = max(unread_count - 1, 0)  # index of the last that the reader has not had
        self._unread_counts[reader, place] = last_unread  # as many come before it
        return values[last_unread]

    def runs_action(self, action: Action) -> bool:
        """Return True if the action is not an opening, and a scope with its tool is open here."""
        return not action.opening and (self._runs_all_tools or self.state.is_open(action.tool))

    def begin(self) -> None:
        """Call the opening routines; allow the graph to call back from now on."""
        self._call_openings()
        self._running[self.number] = self

    def end(self) -> None:
        """Forbid the graph to call back from now on."""
        self._running.pop(self.number, None)

    @contextmanager
    def running(self) -> Iterator[Execution]:
        """Return a context in which the graph may call back; it raises the first exception of a routine."""
        self.begin()
        try:
            with self.raising_routine_error():
                yield self
        finally:
            self.end()

    @contextmanager
    def raising_routine_error(self) -> Iterator[None]:
        """Return a context between `begin` and `end` that raises the first exception of a routine.

        It is raised instead of the framework's, and also where the framework dropped it.
        """
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
        """Call the routines that run once, ahead of all ops of the graph, if their tools are open."""
        openings = self.table.openings if isinstance(self.table, RoutineTable) else ()
        for action, facts in openings:
            if self._runs_all_tools or self.state.is_open(action.tool):
                with explain_errors(facts, action.tool, str(action)), action.tool._amanda.lock:
                    action.func(**action.kwargs)

    def call(self, slot: int, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines of a slot; return the tensors that go back into the graph.

        An exception of a routine passes; the first of the run is kept in `error`.

        Args:
            slot: Slot of the routines in the table.
            flat: Flat tensors that the graph passes.
            rounds: Number of the round of each loop around the place, the outermost loop first.
        """
        try:
            with interceptor.Suspension(), serving(self._caller):
                return self.table[slot].run(self, flat, rounds)
        except BaseException as error:
            with self._lock:
                # The first exception is the cause; those of other threads follow from the run that breaks
                # off.
                self.error = self.error or error
            raise

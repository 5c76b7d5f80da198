"""Routines at the places of a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from amanda.errors import RoutineError
from amanda.plan.routine import run_replacement, run_routine
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.graph.execution import Execution
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps
    from amanda.scope.state import State


class Insertion:
    """Routines that run at one place of a rewritten graph, one after another.

    input_positions: positions of the op's values that the routines receive.
    count: number of values that the op has at this place.
    output_positions: positions of the values that the routines return to the graph, in order.
    sizes: for each received value the length if it is a list; None for a single tensor.
    read_gradients: at a replaced backward op, positions of the gradients that other nodes read.
    depth: number of loops around the forward op; each round has its own `run`.
    original: computes the op, if it is replaced.
    reads: number of tensors of other ops, which follow the op's tensors.
    """

    __slots__ = (
        "actions",
        "count",
        "depth",
        "facts",
        "input_positions",
        "original",
        "output_positions",
        "read_gradients",
        "reads",
        "replaces",
        "sizes",
        "takes_run",
    )  # fmt: skip

    def __init__(
        self,
        actions: Sequence[Action],
        facts: OpFacts,
        count: int,
        input_positions: Sequence[int],
        sizes: Sequence[int | None],
        output_positions: Sequence[int],
        read_gradients: Sequence[int] = (),
    ) -> None:
        self.actions = tuple(actions)
        self.facts = facts
        self.count = count
        self.input_positions = tuple(input_positions)
        self.sizes = tuple(sizes)
        self.output_positions = tuple(output_positions)
        self.read_gradients = tuple(read_gradients)
        self.depth = 0
        self.original: Callable[[Sequence[Any]], Any] | None = None
        self.reads = 0
        self.takes_run = any(action.takes_run for action in self.actions)
        self.replaces = bool(self.actions) and self.actions[0].type.is_replacement

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """Return the op's values, with the flat tensors from the graph in their positions."""
        values: list[Any] = [None] * self.count
        tensors = iter(flat)
        for position, size in zip(self.input_positions, self.sizes, strict=True):
            values[position] = next(tensors) if size is None else [next(tensors) for _ in range(size)]
        return values

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines; return the flat tensors that go back into the graph.

        rounds: number of the round of each loop around the place, the outermost loop first.
        """
        run = self.run_of(execution, rounds) if self.takes_run else {}
        if self.replaces:
            return self.run_replacement(self.actions[0], execution.ops, flat, run)
        actions = [action for action in self.actions if execution.runs_action(action)]
        return self.apply(actions, self.values(flat), execution.ops, execution.state, run)

    def run_of(self, execution: Execution, rounds: Sequence[int]) -> dict[Any, Any]:
        """Return the dict `run` that the routines of one execution of the op share."""
        return execution.runs.setdefault((self.facts.op_id, tuple(rounds[: self.depth])), {})

    def apply(
        self, actions: Sequence[Action], values: list[Any], ops: TensorOps, state: State, run: dict[str, Any]
    ) -> list[Any]:
        """Call routines on values; return the flat tensors that go back into the graph."""
        for action in actions:
            before, values = values, run_routine(ops, action, values, self.facts, run, state.autodiff)
            if values is not before:
                self.check(action, before, values)
        return self.results(values)

    def check(self, action: Action, before: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError where a routine changed a value that cannot go back into the graph.

        before, values: the op's values before and after the routine.
        """

    def results(self, values: Sequence[Any]) -> list[Any]:
        """Return the flat tensors that go back into the graph, from all the op's values."""
        return spread(values[position] for position in self.output_positions)

    def run_replacement(
        self, action: Action, ops: TensorOps, flat: Sequence[Any], run: dict[str, Any]
    ) -> list[Any]:
        """Call a replacement on the flat tensors; return the flat tensors that go back into the graph."""
        input_count = len(flat) - self.reads
        values, reads = self.values(flat[:input_count]), flat[input_count:]
        result = run_replacement(ops, action, values, self.facts, run, (), self.original, reads)
        if result is NotImplemented:
            error = RoutineError(
                f"{action} left the op to itself, which a rewritten graph does not have any more; "
                "let it compute what the op would have"
            )
            raise self.facts.explain(error, action)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        read_gradients = list(self.read_gradients)
        if len(self.output_positions) == 1 and len(results) != 1:
            return results  # one output that is a list
        if len(results) == len(self.output_positions):
            return spread(results)
        if read_gradients and len(results) == len(read_gradients):
            placed: list[Any] = [None] * len(self.output_positions)
            for position, value in zip(read_gradients, results, strict=True):
                placed[position] = value
            return placed
        noun = "gradients" if action.type.is_backward else "outputs"
        error = RoutineError(
            f"{action} returned {len(results)} {noun}; {self.facts.name} gives {len(self.output_positions)}"
        )
        raise self.facts.explain(error, action)


class RoutineTable(dict[int, Any]):
    """The routines of a rewritten graph by their slot."""

    @cached_property
    def openings(self) -> tuple[tuple[Action, OpFacts], ...]:
        """The routines that are called at the start of a run; cached, so read this after the rewrite."""
        insertions = [entry for entry in self.values() if isinstance(entry, Insertion)]
        return tuple(
            (action, entry.facts) for entry in insertions for action in entry.actions if action.opening
        )

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

    given: position of each value that the place is given; the others of the op stay out of sight.
    count: how many values the op has there.
    gives: positions of the values that it gives back, in order.
    sizes: for each given value that is a list, its length; None for a single tensor.
    wanted: of a replaced backward op, positions of the gradients that something reads.
    depth: how many loops are around the forward op; each of their rounds has a `run` of its own.
    original: of a replaced op, what computes it.
    reads: how many tensors of other ops follow those of this one.
    """

    __slots__ = (
        "actions", "count", "depth", "facts", "given", "gives", "original", "reads", "replaces", "sizes",
        "takes_run", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        actions: Sequence[Action],
        facts: OpFacts,
        count: int,
        given: Sequence[int],
        sizes: Sequence[int | None],
        gives: Sequence[int],
        wanted: Sequence[int] = (),
    ) -> None:
        self.actions = tuple(actions)
        self.facts = facts
        self.count = count
        self.given = tuple(given)
        self.sizes = tuple(sizes)
        self.gives = tuple(gives)
        self.wanted = tuple(wanted)
        self.depth = 0
        self.original: Callable[[Sequence[Any]], Any] | None = None
        self.reads = 0
        self.takes_run = any(action.takes_run for action in self.actions)
        self.replaces = bool(self.actions) and self.actions[0].type.is_replacement

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """Return the op's values, made of the flat tensors that the graph hands over."""
        values: list[Any] = [None] * self.count
        tensors = iter(flat)
        for position, size in zip(self.given, self.sizes, strict=True):
            values[position] = next(tensors) if size is None else [next(tensors) for _ in range(size)]
        return values

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the flat tensors that go back into the graph.

        rounds: number of the round of each loop around the place, the outermost loop first.
        """
        run = self.run_of(execution, rounds) if self.takes_run else {}
        if self.replaces:
            return self.replaced(self.actions[0], execution.ops, flat, run)
        actions = [action for action in self.actions if execution.runs_action(action)]
        return self.apply(actions, self.values(flat), execution.ops, execution.state, run)

    def run_of(self, execution: Execution, rounds: Sequence[int]) -> dict[Any, Any]:
        """Return what the routines of one execution of the op hand on."""
        return execution.runs.setdefault((self.facts.op_id, tuple(rounds[: self.depth])), {})

    def apply(
        self, actions: Sequence[Action], values: list[Any], ops: TensorOps, state: State, run: dict[str, Any]
    ) -> list[Any]:
        """Call routines on values; return the flat tensors that the place gives back."""
        for action in actions:
            given, values = values, run_routine(ops, action, values, self.facts, run, state.autodiff)
            if values is not given:
                self.check(action, given, values)
        return self.results(values)

    def check(self, action: Action, given: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError where a routine changed a value that the graph does not take from it.

        given: the op's values as they were.  values: as the routine left them.
        """

    def results(self, values: Sequence[Any]) -> list[Any]:
        """Return the flat tensors that the place gives back, of all the op's values."""
        return spread([values[position] for position in self.gives]) if self.gives else []

    def replaced(self, action: Action, ops: TensorOps, flat: Sequence[Any], run: dict[str, Any]) -> list[Any]:
        """Call a replacement on the flat tensors; return those that the place gives back."""
        own = len(flat) - self.reads
        values, reads = self.values(flat[:own]), flat[own:]
        result = run_replacement(ops, action, values, self.facts, run, (), self.original, reads)
        if result is NotImplemented:
            error = RoutineError(
                f"{action} left the op to itself, which a rewritten graph does not have any more; "
                "let it compute what the op would have"
            )
            raise self.facts.explain(error, action)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        wanted = list(self.wanted)
        if len(self.gives) == 1 and len(results) != 1:
            return results  # one output that is a list
        if len(results) == len(self.gives):
            return spread(results)
        if wanted and len(results) == len(wanted):
            placed: list[Any] = [None] * len(self.gives)
            for position, value in zip(wanted, results, strict=True):
                placed[position] = value
            return placed
        what = "gradients" if action.type.is_backward else "outputs"
        error = RoutineError(
            f"{action} returned {len(results)} {what}; {self.facts.name} gives {len(self.gives)}"
        )
        raise self.facts.explain(error, action)


class Table(dict[int, Any]):
    """The routines of a rewritten graph by their slot."""

    @cached_property
    def openings(self) -> tuple[tuple[Action, OpFacts], ...]:
        """The routines that are called as a run begins; asked for when the graph has been rewritten."""
        places = [one for one in self.values() if isinstance(one, Insertion)]
        return tuple((action, place.facts) for place in places for action in place.actions if action.opening)

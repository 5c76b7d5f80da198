"""Ops of a graph: their analysis before it runs, and the routines that a rewritten copy of it calls.

A driver brings every op of a graph to a `GraphAnalysis`, rewrites a copy of the graph so that it calls
back at the places where there are actions, and makes an `Execution` for each time that the copy runs:
its number travels through the graph, so that graphs of one structure share one copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda._notes import explained
from amanda._plan import BackwardPlan, Combined, Plan, bind_to_subjects, only_replacement
from amanda._routine import TensorOps, run_replacement, run_routine, spread
from amanda.action import InstrumentationPoint, in_turn
from amanda.context import OpContext
from amanda.errors import RoutineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amanda._plan import Layer
    from amanda._state import State
    from amanda.action import Action
    from amanda.context import OpFacts

Rounds = Sequence[int]
"""Which round of each loop around a place, the outermost loop first."""
Runs = dict[tuple[int, tuple[int, ...]], dict[str, Any]]


class GraphAnalysis:
    """The analysis of the ops of one graph, and of graphs that belong to it, by the layers of a state.

    plans: for each op id that has been met, the plans of the layers.
    closed: whether the tools' scopes are closed, so that backward ops have no plans.
    """

    def __init__(self, state: State, ops: TensorOps, layer: Layer | None = None) -> None:
        chosen = layer or state.layer
        assert chosen is not None
        self.state = state
        self.layer = chosen
        self.ops = ops
        self.plans: dict[int, list[tuple[Layer, Plan]]] = {}
        self.closed = False
        self._facts: list[OpFacts] = []

    def forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Combined:
        """Bring an op whose outputs are known beforehand, as symbols."""
        inputs = facts.inputs or []
        pairs: list[tuple[Layer, Plan]] = []
        fresh: list[Plan] = []
        inherited: OpContext | None = None
        for one in self.layer.chain:
            key = one.key(self.ops, inputs)
            plan = one.plans.get(facts.op_id, {}).get(key) if self.state.cache else None
            if plan is None:
                context = OpContext(facts, one.analyse, inherited)
                plan = Plan(context)
                plan.add(context.trigger_callback(InstrumentationPoint.BEFORE_FORWARD_OP))
                fresh.append(plan)
                if self.state.cache:
                    one.plans.setdefault(facts.op_id, {})[key] = plan
            inherited = plan.context
            pairs.append((one, plan))
        facts.outputs = list(outputs)
        for plan in fresh:
            plan.add(plan.context.trigger_callback(InstrumentationPoint.AFTER_FORWARD_OP))
        self.plans[facts.op_id] = pairs
        self._facts.append(facts)
        return Combined(pairs)

    def absent(self, facts: OpFacts, outputs: Sequence[Any]) -> None:
        """Bring an op that does not run itself, though backward ops of it do: no forward analysis."""
        facts.outputs = list(outputs)
        pairs = [(one, Plan(OpContext(facts, one.analyse))) for one in self.layer.chain]
        self.plans[facts.op_id] = pairs
        self._facts.append(facts)

    def backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> BackwardPlan:
        """Bring a backward op of an op that was brought before; `facts` are those `at_backward`."""
        backward_id = facts.backward_op_id
        assert backward_id is not None
        plans: list[BackwardPlan] = []
        fresh: list[tuple[BackwardPlan, OpContext]] = []
        for layer, plan in self.plans.get(facts.op_id, ()):
            if self.closed or not layer.wants_backward:
                continue
            known = plan.backward.get(backward_id)
            if known is None:
                known = plan.backward[backward_id] = BackwardPlan()
                context = OpContext(facts, layer.analyse, plan.context)
                known.add(context.trigger_callback(InstrumentationPoint.BEFORE_BACKWARD_OP))
                fresh.append((known, context))
            plans.append(known)
        facts.grad_inputs = list(grad_inputs)
        for known, context in fresh:
            known.add(context.trigger_callback(InstrumentationPoint.AFTER_BACKWARD_OP))
        self._facts.append(facts)
        return _merged(plans)

    def finish(self, graph: Any = None) -> None:
        """Let go of every symbol that the contexts know; let the plans die with the graph."""
        if graph is not None:
            for facts in self._facts:
                bind_to_subjects(facts.op_id, [graph])
        for facts in self._facts:
            facts.drop_values()
            facts.read_value, facts.variable_of, facts.read_variables = _itself, _nothing, _nothing
        self._facts.clear()

    def forget(self) -> None:
        """Drop the plans made so far, which an exception left incomplete."""
        for op_id, pairs in self.plans.items():
            for layer, _ in pairs:
                layer.forget(op_id)
        self.finish()


def _merged(plans: Iterable[BackwardPlan]) -> BackwardPlan:
    plans = list(plans)
    merged = BackwardPlan()
    merged.before = in_turn((action for plan in plans for action in plan.before), False)
    merged.after = in_turn((action for plan in plans for action in plan.after), True)
    merged.replace = only_replacement(plan.replace for plan in plans)
    return merged


def _nothing(*_: Any) -> None:
    return None


def _itself(value: Any) -> Any:
    return value


class Inserted:
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
        "actions", "count", "depth", "facts", "given", "gives", "original", "reads", "sizes",
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

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """The op's values from the flat tensors that the graph hands over."""
        values: list[Any] = [None] * self.count
        tensors = iter(flat)
        for position, size in zip(self.given, self.sizes, strict=True):
            values[position] = next(tensors) if size is None else [next(tensors) for _ in range(size)]
        return values

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Rounds = ()) -> list[Any]:
        """The flat tensors that go back into the graph; `rounds` of the loops around the place."""
        key = self.facts.op_id, tuple(rounds[: self.depth])
        run = execution.runs.setdefault(key, {}) if self.takes_run else {}
        if self.actions and self.actions[0].type.is_replacement:
            return self.replaced(self.actions[0], execution.ops, flat, run)
        actions = [action for action in self.actions if execution.runs_action(action)]
        return self.apply(actions, self.values(flat), execution.ops, execution.state, run)

    def apply(
        self, actions: Sequence[Action], values: list[Any], ops: TensorOps, state: State, run: dict[str, Any]
    ) -> list[Any]:
        """Call routines on values; the flat tensors that the place gives back."""
        for action in actions:
            values = run_routine(ops, action, values, self.facts, run, state)
        return spread(values[position] for position in self.gives)

    def replaced(self, action: Action, ops: TensorOps, flat: Sequence[Any], run: dict[str, Any]) -> list[Any]:
        """Call a replacement on the flat tensors; those that the place gives back."""
        own = len(flat) - self.reads
        values, reads = self.values(flat[:own]), flat[own:]
        result = run_replacement(ops, action, values, self.facts, run, (), self.original, reads)
        if result is NotImplemented:
            with explained(self.facts, action.tool, str(action)):
                raise RoutineError(
                    f"{action} left the op to itself, which a rewritten graph does not have any more; "
                    "let it compute what the op would have"
                )
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
        with explained(self.facts, action.tool, str(action)):
            raise RoutineError(
                f"{action} returned {len(results)} {what}; {self.facts.name} gives {len(self.gives)}"
            )


class Table(dict[int, Any]):
    """What runs at which slot of a rewritten graph."""

    @cached_property
    def openings(self) -> tuple[tuple[Action, OpFacts], ...]:
        """The routines that are called as a run begins; asked for when the graph has been rewritten."""
        places = [one for one in self.values() if isinstance(one, Inserted)]
        return tuple((action, place.facts) for place in places for action in place.actions if action.opening)


class _Numbers:
    """Numbers of executions, which are given again when an execution is long gone.

    Frameworks keep a tensor for each number that they have met.
    """

    _LATELY = 64

    def __init__(self) -> None:
        self._fresh = count(1)
        self._gone: deque[int] = deque()

    def take(self) -> int:
        """A number that no living execution has."""
        if len(self._gone) > self._LATELY:
            with suppress(IndexError):  # another thread was faster
                return self._gone.popleft()
        return next(self._fresh)

    def give_back(self, number: int) -> None:
        """Hear that an execution is gone."""
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
        table: Mapping[int, Inserted],
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
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._numbers.give_back(self.number)

    @classmethod
    def of(cls, number: int) -> Execution:
        """The execution under way that has this number."""
        return cls._running[number]

    def keep(self, place: Hashable, entry: Any) -> None:
        """Keep something for the backward pass."""
        self.stores.setdefault(place, []).append(entry)

    def kept(self, place: Hashable, reader: Any) -> Any:
        """What a place has kept: to each reader the last first, then those before it."""
        entries = self.stores[place]
        left = self._left[reader, place] = max(self._left.get((reader, place), len(entries)) - 1, 0)
        return entries[left]

    def runs_action(self, action: Action) -> bool:
        """Whether a scope with the action's tool is open for this execution."""
        return not action.opening and (self._every or self.state.is_open(action.tool))

    def begin(self) -> None:
        """Let the graph call back, after the routines that are called as a run begins."""
        self._open()
        self._running[self.number] = self

    def end(self) -> None:
        """The graph calls back no more."""
        self._running.pop(self.number, None)

    @contextmanager
    def under_way(self) -> Iterator[Execution]:
        """Let the graph call back; the first exception of a routine is raised as itself."""
        self.begin()
        try:
            with self.part():
                yield self
        finally:
            self.end()

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of what runs between `begin` and `end`: a routine's exception is raised as itself."""
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
                with explained(facts, action.tool, str(action)), action.tool._amanda.lock:
                    action.func(**action.kwargs)

    def call(self, slot: int, flat: Sequence[Any], rounds: Rounds = ()) -> list[Any]:
        """What the graph calls at a slot, in these rounds of the loops around it, outermost first."""
        try:
            with interceptor.Suspension():
                return self.table[slot].run(self, flat, rounds)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
            raise

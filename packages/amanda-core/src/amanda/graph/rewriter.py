"""The rewrite of one graph: its nodes go to the analysis in order, and routines are put among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from amanda.graph.execution import Execution
from amanda.graph.insertion import Insertion

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting
    from amanda.graph.side import Side
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Actions, Plan

NodeT = TypeVar("NodeT")

_PYTHON_IN_BODY = (
    "it is in a body of control flow, where Python cannot run; a routine of your own can be marked "
    "@amanda.traceable"
)


class NotTraceable(Exception):
    """A routine does something that has no counterpart in a graph; the message says what."""


class Value(NamedTuple):
    """A value of a graph: what it is called there, and its symbol."""

    ref: Any
    symbol: Any


class Rewriter(ABC, Generic[NodeT]):
    """The rewrite of one graph, which a driver's subclass reads and writes.

    `run` takes each node in order: its inputs, as routines before it changed them, the node itself or what
    replaces it, and its outputs.  A routine becomes part of the graph where it is traceable (`inline`), else
    the graph calls it (`call`).

    current: what is read now instead of a value of the graph, by what the value is called.
    calls_python: False where no routine can run as Python, such as in a body of control flow.
    """

    insertion: type[Insertion] = Insertion

    def __init__(
        self, rewriting: Rewriting, current: dict[Any, Any] | None = None, calls_python: bool = True
    ) -> None:
        self.rewriting = rewriting
        self.current = dict(current or {})
        self.calls_python = calls_python

    @abstractmethod
    def nodes(self) -> Iterable[NodeT]:
        """Return the nodes, each after those whose values it reads."""

    @abstractmethod
    def sides(self, node: NodeT) -> tuple[Side, Side]:
        """Return the inputs and the outputs of a node."""

    @abstractmethod
    def facts(self, node: NodeT, inputs: Side) -> OpFacts:
        """Return the facts of a node, with `compute` and `original` where the node can be called."""

    @abstractmethod
    def keep(self, node: NodeT, inputs: Side, outputs: Side) -> None:
        """Write a node, which reads `inputs.refs`."""

    @abstractmethod
    def can_give(self, symbol: Any) -> bool:
        """Return True for a value in whose place a routine can give another: a tensor."""

    def can_replace(self, symbol: Any) -> bool:
        """Return True for a value that what replaces a node can give."""
        return self.can_give(symbol)

    @abstractmethod
    def call(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write a call of routines as Python, in a slot of `rewriting.add`; return the call's results.

        given: the values that it is given.  wanted: symbols of those that it gives in their place; none of
        observers.  side: all the values of the op there, before which an observer does not run.
        """

    def inline(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value]:
        """Make routines part of the graph; return their results.  The arguments are those of `call`.

        Raises NotTraceable.
        """
        raise NotTraceable("the driver writes no routines into graphs")

    def constant(self, symbol: Any) -> Any:
        """Return what a value always is; None where it is computed, or given to the graph."""
        return None

    def stored(self, constant: Any) -> Value:
        """Put a constant that a routine gave into the graph."""
        raise NotImplementedError

    def formed(self, place: Insertion, wanted: Sequence[Any], given_of: Side, gives_to: Side) -> Insertion:
        """Fill in what the driver's own class of insertion has besides; return the insertion.

        wanted: symbols of what the insertion gives.  given_of, gives_to: the sides of what it is given and
        of what it gives.
        """
        return place

    def follow(self, node: NodeT, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Note what a node does, before the routines after it are put there."""

    def leave(self, node: NodeT, replaced: bool) -> None:
        """Finish with a node; rewrite the graphs that it holds."""

    def run(self) -> None:
        """Analyse every node, and put the actions that tools record among the nodes."""
        for node in self.nodes():
            self.at_node(node)

    def at_node(self, node: NodeT) -> None:
        """Analyse a node, and put the actions that tools record around it."""
        inputs, outputs = self.sides(node)
        facts = self.facts(node, inputs)
        plan = self.rewriting.analysis.forward(facts, outputs.values)
        inputs.read(self.current)
        replaced = self.act(node, plan, inputs, outputs, facts)
        self.read_instead(outputs)
        self.leave(node, replaced)

    def read_instead(self, side: Side) -> None:
        """Make others read what routines gave in the place of the values of a side."""
        self.current |= {side.before[i]: side.refs[i] for i in side.changed()}

    def act(self, node: NodeT, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts) -> bool:
        """Put the actions of a plan before, instead of and after a node; return True if it is replaced."""
        self.insert_all(plan.before, inputs, facts)
        replaced = plan.replace is not None and self.replace(plan.replace, inputs, outputs, facts)
        if not replaced:
            self.keep(node, inputs, outputs)
        self.follow(node, inputs, outputs, replaced)
        self.insert_all(plan.after, outputs, facts)
        return replaced

    def insert_all(self, actions: Sequence[Action], side: Side, facts: OpFacts) -> None:
        """Put routines at a side; those of one group that follow one another go into one insertion."""
        for _, group in groupby(actions, self.group):
            together = list(group)
            positions = side.selected([action.select for action in together])
            gives = [] if together[0].observer else side.where(positions, self.can_give)
            self.put(together, side, positions, side, gives, facts)

    def group(self, action: Action) -> Hashable:
        """Group of a routine: by default each traceable one is alone, observers and others are together."""
        return action.observer, action if action.traceable else None

    def replace(self, action: Action, inputs: Side, outputs: Side, facts: OpFacts) -> bool:
        """Put a routine in the place of a node; return True if that is done."""
        gives = outputs.selected([None])
        if outputs.where(gives, self.can_replace) != gives:
            self.rewriting.refuse([action], facts, "what the op gives is no tensor")
            return False
        if action.reads:
            self.rewriting.refuse([action], facts, "it reads inputs of other ops")
            return False
        return self.put([action], inputs, inputs.selected([action.select]), outputs, gives, facts)

    def put(
        self,
        actions: Sequence[Action],
        given_of: Side,
        positions: Sequence[int],
        gives_to: Side,
        gives: Sequence[int],
        facts: OpFacts,
        others: Sequence[Value] = (),
    ) -> bool:
        """Put routines that are given values of one side where they give values of one; False if refused.

        others: values of other nodes that they are given besides.
        """
        sizes = [given_of.sizes[i] for i in positions]
        given = [Value(given_of.refs[i], given_of.symbols[i]) for i in given_of.flat(positions)]
        given += others
        out = gives_to.flat(gives)
        wanted = [gives_to.symbols[i] for i in out]
        place = self.insertion(actions, facts, given_of.count, positions, sizes, gives)
        if actions[0].takes_original and facts.original is not None:
            place.original = facts.original()
        place.reads = len(others)
        made = self._written(self.formed(place, wanted, given_of, gives_to), given, wanted, given_of)
        if made is None:
            return False
        for i, (ref, symbol) in zip(out, made, strict=True):
            self.rewriting.changed |= ref != gives_to.refs[i]
            gives_to.refs[i], gives_to.symbols[i] = ref, symbol
        return True

    def _written(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value] | None:
        """Return what a place gives in the new graph; None where the graph stays as it is there."""
        actions, rewriting, facts = place.actions, self.rewriting, place.facts
        why = self.untraced(place)
        if why is None:
            why = self._restless(actions, facts)
        may_run_once = rewriting.written and not actions[0].observer and not place.takes_run
        may_fold = why is None or may_run_once
        constants = [self.constant(one.symbol) for one in given] if may_fold else []
        if constants and all(one is not None for one in constants):
            return self._traced(actions, lambda: self._folded(place, given, constants))
        if why is None:
            try:
                return self._traced(actions, lambda: self.inline(place, given, wanted, side))
            except NotTraceable as error:
                why = str(error)
        if rewriting.written or not self.calls_python:
            kept_out = actions[0].traceable or rewriting.written
            rewriting.refuse(actions, facts, why if kept_out else _PYTHON_IN_BODY)
            return None
        if why:
            self.tell_called(place, why)
        rewriting.free |= bool(wanted) and self.frees_shapes(place)
        rewriting.changed = True
        return self.call(place, given, wanted, side)

    def untraced(self, place: Insertion) -> str | None:
        """Return why routines are not even tried to be traced ("": nothing to tell); None where they are."""
        for action in place.actions:
            if not action.traceable:
                return "it is not marked @amanda.traceable"
            if action.takes_run:
                return "it takes `run`, which belongs to one execution"
            if action.takes_original:
                return "it takes `original`, which is called"
        return None

    def tell_called(self, place: Insertion, why: str) -> None:
        """Report that traceable routines run as Python."""
        for action in place.actions:
            if action.traceable:
                what = f"traceable {action} of {place.facts.name}"
                self.rewriting.report(what, f"{why}, so it runs as Python")

    def frees_shapes(self, place: Insertion) -> bool:
        """Return True if routines may give other shapes than those that the graph had there."""
        return (
            self.rewriting.state.autodiff
            or place.replaces
            or any(one.differentiable for one in place.actions)
        )

    def results(self, place: Insertion, values: Sequence[Any]) -> list[Any]:
        """Return what routines make of constants, or of values that record what is computed of them."""
        return place.run(Execution(self.rewriting.state, self.rewriting.ops, {}), values)

    def _folded(self, place: Insertion, given: Sequence[Value], constants: Sequence[Any]) -> list[Value]:
        """Call routines once, on constants, and put what they give into the graph."""
        results = self.results(place, constants)
        self.rewriting.folded += place.actions
        known = {id(constant): value for constant, value in zip(constants, given, strict=True)}
        return [known.get(id(one)) or self.stored(one) for one in results]

    def _traced(self, actions: Sequence[Action], write: Callable[[], list[Value]]) -> list[Value]:
        """Make routines part of the graph, and note what they read meanwhile."""
        with self.rewriting.reads.tracing(actions):
            made = write()
        self.rewriting.traced += [(action, ()) for action in actions]
        return made

    def _restless(self, actions: Sequence[Action], facts: OpFacts) -> str | None:
        """Return why routines are not traced once more; None where what they read has had few values."""
        changing = next(filter(None, map(self.rewriting.restless, actions)), None)
        if changing is None:
            return None
        why = f"what it reads changes often: {changing}"
        if self.calls_python:
            return why
        for action in actions:
            self.rewriting.report(
                f"traceable {action} of {facts.name}",
                f"{why}, and each time another copy of the graph is made",
            )
        return None

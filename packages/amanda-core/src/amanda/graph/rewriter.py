"""The rewrite of one graph: analyse its nodes in order, and insert routines between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from amanda.graph.execution import Execution, Insertion

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting, Side
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Actions, Plan

NodeT = TypeVar("NodeT")

_PYTHON_IN_BODY = (
    "it is in a body of control flow, where Python cannot run; a routine of your own can be marked "
    "@amanda.traceable"
)


class NotTraceable(Exception):
    """Raised for a routine with an operation that a graph cannot express; the message names the operation."""


class Value(NamedTuple):
    """A value of a graph: its name in the graph, and its symbol."""

    ref: Any
    symbol: Any


class Rewriter(ABC, Generic[NodeT]):
    """The rewrite of one graph, which a driver's subclass reads and writes.

    `run` handles each node in order: routines at its inputs, the node itself or its replacement, routines at
    its outputs.  A traceable routine becomes part of the graph (`inline`); others are called (`call`).

    Args:
        rewriting: State of the rewrite, which graphs within the graph share.
        current_refs: By the name of each replaced value, the name that readers use instead; None for none.
        calls_python: False where no routine can run as Python, such as in a body of control flow.
    """

    insertion_type: type[Insertion] = Insertion

    def __init__(
        self, rewriting: Rewriting, current_refs: dict[Any, Any] | None = None, calls_python: bool = True
    ) -> None:
        self.rewriting = rewriting
        # A copy: what is replaced in a body holds in the body alone.
        self.current_refs = dict(current_refs or {})
        self.calls_python = calls_python

    @abstractmethod
    def nodes(self) -> Iterable[NodeT]:
        """Return the nodes, each after those whose values it reads."""

    @abstractmethod
    def sides(self, node: NodeT) -> tuple[Side, Side]:
        """Return the inputs and the outputs of a node."""

    @abstractmethod
    def facts(self, node: NodeT, inputs: Side) -> OpFacts:
        """Return the facts of a node, with `compute` and `original` where the node can be called.

        Args:
            node: Node of the graph.
            inputs: Its inputs, from `sides`.
        """

    @abstractmethod
    def write_node(self, node: NodeT, inputs: Side, outputs: Side) -> None:
        """Write a node to the new graph; it reads `inputs.refs`.

        Args:
            node: Node of the graph.
            inputs: Its inputs, with the values that routines have replaced.
            outputs: Its outputs, under whose names it is written.
        """

    @abstractmethod
    def is_changeable(self, symbol: Any) -> bool:
        """Return True for a value that the result of a routine can replace: a tensor."""

    def is_computable(self, symbol: Any) -> bool:
        """Return True for a value that the replacement of a node can compute."""
        return self.is_changeable(symbol)

    @abstractmethod
    def write_call(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write a Python call of routines, in a slot of `rewriting.add_slot`; return the call's results.

        Args:
            insertion: Routines to call.
            inputs: Values that the routines receive.
            outputs: Symbols of the values that the results replace; none for observers.
            side: All values of the op at this place; observers run after these are computed.
        """

    def inline(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write traceable routines as nodes; return their results.

        Args:
            insertion: Routines to write.
            inputs: Values that the routines receive.
            outputs: Symbols of the values that the results replace.
            side: All values of the op at this place.

        Raises:
            NotTraceable: For an operation that the graph cannot express, and in the base.
        """
        raise NotTraceable("the driver writes no routines into graphs")

    def constant_value(self, symbol: Any) -> Any:
        """Return the value of a constant; None for a value that is computed, or an input of the graph."""
        return None

    def store_constant(self, constant: Any) -> Value:
        """Store a constant that a routine returned in the graph."""
        raise NotImplementedError

    def complete_insertion(
        self, insertion: Insertion, symbols: Sequence[Any], inputs_side: Side, outputs_side: Side
    ) -> Insertion:
        """Set the additional fields of a driver's subclass of Insertion; return the insertion.

        The base sets none.

        Args:
            insertion: Object of `insertion_type`.
            symbols: Symbols of the values that the insertion returns.
            inputs_side: Side of the values that the insertion receives.
            outputs_side: Side of the values that the insertion returns.
        """
        return insertion

    def note_effects(self, node: NodeT, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Record a node's effects; called before routines are inserted after it.

        The base has none to record.

        Args:
            node: Node of the graph.
            inputs: Its inputs.
            outputs: Its outputs.
            replaced: Whether a routine stands in the place of the node.
        """

    def rewrite_inner_graphs(self, node: NodeT, replaced: bool) -> None:
        """Rewrite the graphs inside a node, such as bodies of loops; none in the base.

        Args:
            node: Node of the graph.
            replaced: Whether a routine stands in the place of the node.
        """

    def run(self) -> None:
        """Analyse every node, and insert the actions that tools record between the nodes."""
        for node in self.nodes():
            self.rewrite_node(node)

    def rewrite_node(self, node: NodeT) -> None:
        """Analyse a node, insert the actions that tools record around it, and rewrite graphs inside it."""
        inputs, outputs = self.sides(node)
        facts = self.facts(node, inputs)
        plan = self.rewriting.analysis.analyse_forward(facts, outputs.values)
        # After the analysis, which sees the graph's own values and not those of routines.
        inputs.read_replaced_values(self.current_refs)
        replaced = self.insert_actions(node, plan, inputs, outputs, facts)
        self.redirect_readers(outputs)
        self.rewrite_inner_graphs(node, replaced)

    def redirect_readers(self, side: Side) -> None:
        """Make later nodes read the results of routines instead of the replaced values of a side."""
        for i in side.replaced_positions():
            self.current_refs[side.original_refs[i]] = side.refs[i]

    def insert_actions(
        self, node: NodeT, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts
    ) -> bool:
        """Insert the actions of a plan before, instead of and after a node; return True if it is replaced.

        Args:
            node: Node of the graph.
            plan: Actions at the node.
            inputs: Inputs of the node.
            outputs: Outputs of the node.
            facts: Facts of the node.
        """
        self.insert_all(plan.before, inputs, facts)
        replaced = plan.replace is not None and self.replace(plan.replace, inputs, outputs, facts)
        if not replaced:
            self.write_node(node, inputs, outputs)
        self.note_effects(node, inputs, outputs, replaced)
        self.insert_all(plan.after, outputs, facts)
        return replaced

    def insert_all(self, actions: Sequence[Action], side: Side, facts: OpFacts) -> None:
        """Insert routines at a side; consecutive routines of one group go into one insertion.

        Args:
            actions: Actions in the order in which the routines run.
            side: Values that the routines receive and replace.
            facts: Facts of the node.
        """
        # Only consecutive ones, so that routines run in the order of tools.
        for _, group in groupby(actions, self.group):
            group_actions = list(group)
            positions = side.selected_positions([action.select for action in group_actions])
            # Observers return nothing to the graph, so nothing waits for them.
            are_observers = group_actions[0].observer
            output_positions = [] if are_observers else side.positions_where(positions, self.is_changeable)
            self.insert(group_actions, side, positions, side, output_positions, facts)

    def group(self, action: Action) -> Hashable:
        """Return the group of a routine: observers, others, and each traceable routine alone."""
        # A traceable routine is alone, so that one that cannot be traced leaves the others in the graph.
        return action.observer, action if action.traceable else None

    def replace(self, action: Action, inputs: Side, outputs: Side, facts: OpFacts) -> bool:
        """Insert a routine in the place of a node; return False if it was refused, so that the node stays.

        Args:
            action: The replacement.
            inputs: Inputs of the node, which the routine receives.
            outputs: Outputs of the node, which the routine computes.
            facts: Facts of the node.
        """
        output_positions = outputs.selected_positions([None])
        if outputs.positions_where(output_positions, self.is_computable) != output_positions:
            self.rewriting.refuse([action], facts, "what the op gives is no tensor")
            return False
        if action.reads:
            self.rewriting.refuse([action], facts, "it reads inputs of other ops")
            return False
        return self.insert(
            [action], inputs, inputs.selected_positions([action.select]), outputs, output_positions, facts
        )

    def insert(
        self,
        actions: Sequence[Action],
        input_side: Side,
        input_positions: Sequence[int],
        output_side: Side,
        output_positions: Sequence[int],
        facts: OpFacts,
        extra_inputs: Sequence[Value] = (),
    ) -> bool:
        """Insert routines that read values of one side and replace values of one; return False if refused.

        Updates the names and symbols of the replaced values.

        Args:
            actions: Actions of one group, in the order in which the routines run.
            input_side: Side of the values that the routines receive.
            input_positions: Positions of these values.
            output_side: Side of the values that the results replace.
            output_positions: Positions of these values.
            facts: Facts of the node.
            extra_inputs: Values of other nodes that the routines receive besides.
        """
        list_lengths = [input_side.sizes[i] for i in input_positions]
        inputs = [
            Value(input_side.refs[i], input_side.symbols[i])
            for i in input_side.flat_positions(input_positions)
        ]
        inputs += extra_inputs
        flat_outputs = output_side.flat_positions(output_positions)
        output_symbols = [output_side.symbols[i] for i in flat_outputs]
        insertion = self.insertion_type(
            actions, facts, input_side.count, input_positions, list_lengths, output_positions
        )
        # Only on demand: creating the function takes time.
        if actions[0].takes_original and facts.original is not None:
            insertion.original = facts.original()
        insertion.extra_input_count = len(extra_inputs)
        results = self._write_insertion(
            self.complete_insertion(insertion, output_symbols, input_side, output_side),
            inputs,
            output_symbols,
            input_side,
        )
        if results is None:
            return False
        for i, (ref, symbol) in zip(flat_outputs, results, strict=True):
            # A routine that returns nothing leaves the names as they are; the graph itself runs if all do.
            self.rewriting.has_insertions |= ref != output_side.refs[i]
            output_side.refs[i], output_side.symbols[i] = ref, symbol
        return True

    def _write_insertion(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value] | None:
        """Write an insertion; return its results, or None where it is refused.

        Routines whose inputs are constants are called now, and their results are stored in the graph.  Other
        traceable routines are written as nodes, all others as a call of Python, if Python can run there.
        Reports traceable routines that become such a call.
        """
        actions, rewriting, facts = insertion.actions, self.rewriting, insertion.facts
        # None while nothing speaks against tracing; "" is a reason that is not reported.
        trace_obstacle = self.reason_not_to_trace(insertion)
        if trace_obstacle is None:
            trace_obstacle = self._volatile_obstacle(actions, facts)
        # In a file an untraced routine may still run now, once, if all its inputs are constants of the file.
        may_run_once = rewriting.is_for_file and not actions[0].observer and not insertion.takes_run
        if trace_obstacle is None or may_run_once:
            constants = [self.constant_value(value.symbol) for value in inputs]
            if constants and all(value is not None for value in constants):
                return self._write_traced(actions, lambda: self._fold_constants(insertion, inputs, constants))
        if trace_obstacle is None:
            try:
                return self._write_traced(actions, lambda: self.inline(insertion, inputs, outputs, side))
            except NotTraceable as error:
                trace_obstacle = str(error)
        if rewriting.is_for_file or not self.calls_python:
            # In a body a routine that is not marked traceable was not meant to be traced: then the reason is
            # that Python cannot run there.
            was_to_be_traced = actions[0].traceable or rewriting.is_for_file
            rewriting.refuse(actions, facts, trace_obstacle if was_to_be_traced else _PYTHON_IN_BODY)
            return None
        if trace_obstacle:  # not "", which stands for a reason that is not reported
            self.report_python_call(insertion, trace_obstacle)
        rewriting.may_change_shapes |= bool(outputs) and self.may_change_shapes(insertion)
        rewriting.has_insertions = True
        return self.write_call(insertion, inputs, outputs, side)

    def reason_not_to_trace(self, insertion: Insertion) -> str | None:
        """Return the reason why routines are called without an attempt to trace; None if tracing is tried.

        "" stands for a reason that is not reported.
        """
        for action in insertion.actions:
            if not action.traceable:
                return "it is not marked @amanda.traceable"
            if action.takes_run:
                return "it takes `run`, which belongs to one execution"
            if action.takes_original:
                return "it takes `original`, which is called"
        return None

    def report_python_call(self, insertion: Insertion, why: str) -> None:
        """Report traceable routines that run as Python calls.

        Args:
            insertion: Routines, of which only traceable ones are reported.
            why: Reason why they are not traced.
        """
        for action in insertion.actions:
            if action.traceable:
                subject = f"traceable {action} of {insertion.facts.name}"
                self.rewriting.report(subject, f"{why}, so it runs as Python")

    def may_change_shapes(self, insertion: Insertion) -> bool:
        """Return True if routines may return other shapes than those of the values in the graph.

        Routines may where autodiff goes through the routines, and where they replace an op.
        """
        return (
            self.rewriting.state.autodiff
            or insertion.is_replacement
            or any(action.differentiable for action in insertion.actions)
        )

    def run_routines(self, insertion: Insertion, values: Sequence[Any]) -> list[Any]:
        """Call routines on constants, or on symbols that record computations; return their results.

        Args:
            insertion: Routines to call.
            values: Flat values that the routines receive: constants or symbols.
        """
        return insertion.run(Execution(self.rewriting.state, self.rewriting.ops, {}), values)

    def _fold_constants(
        self, insertion: Insertion, inputs: Sequence[Value], constants: Sequence[Any]
    ) -> list[Value]:
        """Call routines once, on constants; store the results in the graph, and record the folded actions."""
        results = self.run_routines(insertion, constants)
        self.rewriting.folded_actions += insertion.actions
        # A routine may hand back its input, which the graph has already.
        input_by_id = {id(constant): value for constant, value in zip(constants, inputs, strict=True)}
        return [input_by_id.get(id(result)) or self.store_constant(result) for result in results]

    def _write_traced(self, actions: Sequence[Action], write: Callable[[], list[Value]]) -> list[Value]:
        """Call `write`, which writes routines; record their actions, and the values that they read."""
        with self.rewriting.reads.record_tracing(actions):
            results = write()
        self.rewriting.traced_actions += [(action, ()) for action in actions]
        return results

    def _volatile_obstacle(self, actions: Sequence[Action], facts: OpFacts) -> str | None:
        """Return the reason not to trace routines that read values which change often; None if there is none.

        Where Python cannot run, they are traced nevertheless: None is returned, and the report says so.
        """
        names = (self.rewriting.volatile_name(action) for action in actions)
        volatile_name = next((name for name in names if name), None)
        if volatile_name is None:
            return None
        reason = f"what it reads changes often: {volatile_name}"
        if self.calls_python:
            return reason
        for action in actions:
            self.rewriting.report(
                f"traceable {action} of {facts.name}",
                f"{reason}, and each time another copy of the graph is made",
            )
        return None

"""One rewrite of a graph: the analysis of its ops, what the rewrite gives, and the values at a node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.graph.execution import RoutineTable
from amanda.graph.reads import Reads, ValueHistory
from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import OpAnalysis, PendingBackwardPlan
from amanda.plan.context import OpContext
from amanda.plan.lifetime import bind_to_subjects
from amanda.plan.plan import Actions, Plan

if TYPE_CHECKING:
    from amanda.namespace import Namespace
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.scope.state import State


class GraphAnalysis:
    """The analysis of the ops of one graph, and of graphs that belong to it, by the tools of a state.

    plans: plans of the analysed ops, by op id.
    scopes_closed: whether the tools' scopes are closed, so that backward ops have no plans.

    Args:
        state: State whose tools analyse the ops.
        ops: Primitives of the framework's tensors.
        stack: Tools of a graph of gradients, those of its forward graph; None for the tools of the state.
        history: Values that traceable routines have read for earlier copies of the graph; None for no copies.
    """

    def __init__(
        self,
        state: State,
        ops: TensorOps,
        stack: ToolStack | None = None,
        history: ValueHistory | None = None,
    ) -> None:
        # A graph of gradients is analysed by the stack of its forward graph, whatever scopes are open now.
        stack = stack or state.stack
        assert stack is not None
        self.state = state
        self.stack = stack
        self.ops = ops
        self.history = history
        self.plans: dict[int, Plan] = {}
        self.scopes_closed = False
        self._facts: list[OpFacts] = []

    def analyse_forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Plan:
        """Run the analysis routines of a forward op, before and after it; return its plan, stored for later.

        Without the cache the plan is not stored.

        Args:
            facts: Facts of the op, with its symbolic inputs.
            outputs: Its symbolic outputs.
        """
        key = self.stack.plan_key(self.ops, facts.inputs or ())
        analysis = OpAnalysis(facts, self.ops, self.stack, key, self.state.cache)
        facts.outputs = list(outputs)
        plan = analysis.analyse_after_op()
        if self.state.cache:
            analysis.store_plans()
        self.plans[facts.op_id] = plan
        self._facts.append(facts)
        return plan

    def add_absent_op(self, facts: OpFacts, outputs: Sequence[Any]) -> None:
        """Register an op that does not run itself although its backward ops do; no forward analysis runs.

        Args:
            facts: Facts of the op, with its symbolic inputs.
            outputs: Its symbolic outputs.
        """
        facts.outputs = list(outputs)
        plan: Plan | None = None
        for stack in self.stack.chain:  # the outermost first
            plan = Plan(stack, OpContext(facts, stack.analyse), outer=plan)
        assert plan is not None
        self.plans[facts.op_id] = plan
        self._facts.append(facts)

    def analyse_backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> Actions:
        """Analyse a backward op of an analysed op; return its actions, or those of an earlier analysis.

        Args:
            facts: Facts of the backward op, from `OpFacts.for_backward_op`, with the gradients that enter it.
            grad_inputs: Symbols of the gradients that leave the backward op.
        """
        backward_id = facts.backward_op_id
        assert backward_id is not None
        actions_by_stack: list[Actions] = []
        pending_plans: list[PendingBackwardPlan] = []
        forward_plan = self.plans.get(facts.op_id)
        plans: Sequence[Plan] = ()
        if forward_plan is not None and not self.scopes_closed:
            plans = forward_plan.plans_with_backward
        for plan in plans:
            actions = plan.backward.actions.get(backward_id)
            if actions is None:
                tools = plan.stack.backward_tools
                pending_plan = PendingBackwardPlan(facts, plan, tools, ignore_earlier=False)
                pending_plan.analyse(InstrumentationPoint.BEFORE_BACKWARD_OP, facts)
                pending_plans.append(pending_plan)
                actions = pending_plan.plan  # gets the actions after the op as well, below
            actions_by_stack.append(actions)
        facts.grad_inputs = list(grad_inputs)
        for pending_plan in pending_plans:
            pending_plan.analyse(InstrumentationPoint.AFTER_BACKWARD_OP, facts)
            pending_plan.store()
        self._facts.append(facts)
        return Actions.merged(actions_by_stack)

    def release_symbols(self, graph: Any = None) -> None:
        """Drop every symbol from the contexts, and bind the plans to the life of the graph; None: to none."""
        if graph is not None:
            for facts in self._facts:
                bind_to_subjects(facts.op_id, [graph])
        for facts in self._facts:
            facts.drop_values()
            # The driver's functions hold the graph, and contexts live as long as their plans.
            facts.read_value = _identity
            facts.variable_of = facts.read_variables = _return_none
        self._facts.clear()

    def drop_plans(self) -> None:
        """Drop the plans of this analysis, which an exception has left incomplete, and every symbol."""
        for op_id, plan in self.plans.items():
            for scope_plan in plan.chain:
                # Routines after the op, and those of other scopes, may be missing in it.
                scope_plan.stack.forget_plans(op_id)
        self.release_symbols()


def _return_none(*_: Any) -> None:
    return None


def _identity(value: Any) -> Any:
    return value


@dataclass(kw_only=True)
class Rewriting:
    """State of one rewrite of a graph, with the graphs that it calls or holds: what was inserted and refused.

    analysis: analysis of the ops.  namespace: namespace of the ops.
    is_for_file: True for a graph that is written into a file and runs without Amanda: routines that would
    have to run as Python are in `refused`.
    history: values that traceable routines have read for earlier copies.
    table: the routines that are called as Python, by slot.
    reports: descriptions of uninstrumented parts, with reasons.
    has_insertions: True once a routine was inserted.
    may_change_shapes: True once a routine may have changed the shape of a result of the graph.
    gradient_data: data for graphs that compute gradients of this graph in another run.
    reads: values that traceable routines read for this copy.
    traced_actions: the actions of these routines, with the tensors that they hold.
    folded_actions: actions whose routines were called once, on constants.
    """

    analysis: GraphAnalysis
    namespace: Namespace
    is_for_file: bool = False
    history: ValueHistory = field(default_factory=lambda: ValueHistory(Reads))
    table: RoutineTable = field(default_factory=RoutineTable)
    reports: dict[tuple[str, str], None] = field(default_factory=dict)
    refused: list[tuple[OpFacts, Action, str]] = field(default_factory=list)
    folded_actions: list[Action] = field(default_factory=list)
    traced_actions: list[tuple[Action, Sequence[Any]]] = field(default_factory=list)
    has_insertions: bool = False
    may_change_shapes: bool = False
    gradient_data: Any = None
    _volatile_names: dict[Action, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take history, state and tensor primitives from the analysis; start with empty reads."""
        # A graph without copies, such as that of a file, has a history of its own.
        self.history = self.analysis.history or self.history
        self.reads = self.history.reads_type()
        self.state = self.analysis.state
        self.ops = self.analysis.ops

    def add_slot(self, routines: Any) -> int:
        """Put routines into the table; return their slot."""
        slot = len(self.table)
        self.table[slot] = routines
        return slot

    def report(self, subject: str, reason: str) -> None:
        """Record a part that is not instrumented, for the report at each execution.

        Args:
            subject: Description of the part.
            reason: Reason why it is not instrumented.
        """
        # A dict as an ordered set: a graph may give one reason at hundreds of nodes.
        self.reports.setdefault((subject, reason))

    def report_restarted(self, name: str) -> None:
        """Report a node whose kernel holds a state, such as a generator's, that a copy does not share."""
        self.report(f"the state of {name}", "its kernel holds it, and a copy's begins anew")

    def refuse(self, actions: Sequence[Action], facts: OpFacts, why: str) -> None:
        """Record that routines do not run at all; report it and notify their tools, unless it is for a file.

        Args:
            actions: Actions of the routines.
            facts: Facts of their op.
            why: Reason why the routines do not run.
        """
        for action in actions:
            self.refused.append((facts, action, why))
            if not self.is_for_file:
                self.report(f"{action} of {getattr(facts.op, 'name', facts.op)} ({facts.name})", why)
                action.tool.refused(action, why)

    def volatile_name(self, action: Action) -> str:
        """Return the name of a value that a routine reads and that changes often, "" if there is none.

        A routine with such a value is not traced, since each change would build another copy.
        """
        # To follow a routine's reads takes long, and it may be inserted at hundreds of ops.
        if action not in self._volatile_names:
            self._volatile_names[action] = self.history.volatile_name(action)
        return self._volatile_names[action]

    def report_unfollowed(self) -> None:
        """Report values that traceable routines read or set and that the copy does not follow."""
        for subject, reason in self.reads.unfollowed_entries(self.traced_actions):
            self.report(subject, reason)


class Side:
    """The inputs or outputs of a node, in order, with the names (refs) under which the graph reads them.

    A value may be a list of tensors; flat positions count each tensor of a list.

    refs: the name of each flat value, or of the routine's result that replaced the value.
    original_refs: the names of the flat values before routines replaced values.

    Args:
        refs: Name of each flat value for its readers.
        symbols: Each flat value as an analysis sees it.
        sizes: For each value the length of a list; None for a single tensor.
        unread: Flat positions of values that routines do not receive.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        symbols: Sequence[Any],
        sizes: Sequence[int | None],
        unread: Collection[int] = (),
    ) -> None:
        self.refs = list(refs)
        # Two lists, whose differences are the values that readers have to find elsewhere.
        self.original_refs = list(refs)
        self.symbols = list(symbols)
        self.sizes = list(sizes)
        self.unread = frozenset(unread)
        self._first_positions: list[int] = []  # flat position of each value's first tensor
        flat_position = 0
        for size in self.sizes:
            self._first_positions.append(flat_position)
            flat_position += 1 if size is None else size

    @property
    def count(self) -> int:
        """Return the number of values."""
        return len(self.sizes)

    @property
    def values(self) -> list[Any]:
        """Return the symbols for an analysis, with a list for a value that is a list."""
        return [
            self.symbols[first] if size is None else self.symbols[first : first + size]
            for first, size in zip(self._first_positions, self.sizes, strict=True)
        ]

    def selected_positions(self, selections: Sequence[Sequence[int] | None]) -> list[int]:
        """Return the positions of values that routines with these selections receive; None selects all.

        Positions beyond the node's values, and values with an unread tensor, are left out.
        """
        count, positions = self.count, set[int]()
        for selection in selections:
            if selection is None:
                positions.update(range(count))
            else:
                # Positions may be negative, as in Python's lists.
                positions.update(position % count for position in selection if -count <= position < count)
        return sorted(position for position in positions if self.unread.isdisjoint(self._range(position)))

    def flat_positions(self, positions: Sequence[int]) -> list[int]:
        """Return the flat positions of values."""
        return [i for position in positions for i in self._range(position)]

    def positions_where(self, positions: Sequence[int], holds: Callable[[Any], bool]) -> list[int]:
        """Return the positions among `positions` where a condition holds for each symbol.

        Args:
            positions: Positions of values.
            holds: Condition for one symbol.
        """
        return [
            position for position in positions if all(holds(self.symbols[i]) for i in self._range(position))
        ]

    def replaced_positions(self) -> list[int]:
        """Return the flat positions of replaced values."""
        return [
            i for i, (old, new) in enumerate(zip(self.original_refs, self.refs, strict=True)) if old != new
        ]

    def read_replaced_values(self, current_refs: Mapping[Any, Any]) -> None:
        """Read the results of earlier routines in place of the values that they replaced.

        The names of these results become the original ones.

        Args:
            current_refs: Name of each result, by the name of the replaced value.
        """
        self.refs = [current_refs.get(ref, ref) for ref in self.refs]
        self.original_refs = list(self.refs)

    def _range(self, position: int) -> range:
        """Return the flat positions of the value at a position."""
        size, first = self.sizes[position], self._first_positions[position]
        return range(first, first + (1 if size is None else size))

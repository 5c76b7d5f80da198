"""The state and the results of one rewrite of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.graph.guards import History
from amanda.graph.insertion import RoutineTable
from amanda.graph.reads import Reads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amanda.graph.analysis import GraphAnalysis
    from amanda.namespace import Namespace
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts


@dataclass(kw_only=True)
class Rewriting:
    """One rewrite of a graph, with the graphs that it calls or holds.

    analysis: analysis of the ops.  namespace: namespace of the ops.
    written: True for a graph that is written into a file and runs without Amanda: routines that would have
    to run as Python are in `refused`.
    history: values that traceable routines have read for earlier copies.
    table: the routines that are called as Python, by slot.
    reports: descriptions of uninstrumented parts, with reasons.  changed: True once a routine was inserted.
    free: True once a routine may have changed the shape of a result of the graph.
    handed_on: data for graphs that compute gradients of this graph in another run.
    reads: values that traceable routines read for this copy.  traced: the routines' actions, with the tensors
    that they hold.  folded: actions whose routines were called once, on constants.
    """

    analysis: GraphAnalysis
    namespace: Namespace
    written: bool = False
    history: History = field(default_factory=lambda: History(Reads))
    table: RoutineTable = field(default_factory=RoutineTable)
    reports: dict[tuple[str, str], None] = field(default_factory=dict)
    refused: list[tuple[OpFacts, Action, str]] = field(default_factory=list)
    folded: list[Action] = field(default_factory=list)
    traced: list[tuple[Action, Sequence[Any]]] = field(default_factory=list)
    changed: bool = False
    free: bool = False
    handed_on: Any = None
    _volatile_names: dict[Action, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history = self.analysis.history or self.history
        self.reads = self.history.reads()
        self.state = self.analysis.state
        self.ops = self.analysis.ops

    def add(self, routines: Any) -> int:
        """Put routines into the table; return their slot."""
        slot = len(self.table)
        self.table[slot] = routines
        return slot

    def report(self, subject: str, reason: str) -> None:
        """Record a part that is not instrumented, for the report at each execution."""
        self.reports.setdefault((subject, reason))

    def refuse(self, actions: Sequence[Action], facts: OpFacts, why: str) -> None:
        """Record that routines do not run at all, and notify their tools."""
        for action in actions:
            self.refused.append((facts, action, why))
            if not self.written:
                self.report(f"{action} of {getattr(facts.op, 'name', facts.op)} ({facts.name})", why)
                action.tool.refused(action, why)

    def volatile_name(self, action: Action) -> str:
        """Return the name of a value that a routine reads and that changes often, "" if there is none.

        A routine with such a value is not traced, since each change would build another copy.
        """
        if action not in self._volatile_names:
            self._volatile_names[action] = self.history.volatile_name(action)
        return self._volatile_names[action]

    def report_unfollowed(self) -> None:
        """Report values that traceable routines read or set and that the copy does not follow."""
        for subject, reason in self.reads.unfollowed(self.traced):
            self.report(subject, reason)

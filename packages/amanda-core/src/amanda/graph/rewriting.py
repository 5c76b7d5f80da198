"""One rewrite of a graph: what is known meanwhile, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.graph.guards import History
from amanda.graph.insertion import Table
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

    analysis: of the ops.  namespace: their tags.
    written: True for a graph that is written into a file and runs without Amanda: no routine may run as
    Python, and those that would have to are in `refused`.
    history: what traceable routines have read for earlier copies: that of the analysis, where it has one.
    table: the routines that are called as Python, by slot.
    reports: what is not instrumented, and why.  changed: True once anything was inserted.
    free: True once a routine may have changed the shape of what the graph computes.
    handed_on: what is left for graphs that compute gradients of this one in another run.
    reads: what traceable routines read for this copy.  traced: these, with the tensors that they hold.
    folded: actions whose routines were called once, on constants.
    """

    analysis: GraphAnalysis
    namespace: Namespace
    written: bool = False
    history: History = field(default_factory=lambda: History(Reads))
    table: Table = field(default_factory=Table)
    reports: dict[tuple[str, str], None] = field(default_factory=dict)
    refused: list[tuple[OpFacts, Action, str]] = field(default_factory=list)
    folded: list[Action] = field(default_factory=list)
    traced: list[tuple[Action, Sequence[Any]]] = field(default_factory=list)
    changed: bool = False
    free: bool = False
    handed_on: Any = None
    _restless: dict[Action, str] = field(default_factory=dict)

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

    def report(self, what: str, reason: str) -> None:
        """Note what is not instrumented, to be told at each execution."""
        self.reports.setdefault((what, reason))

    def refuse(self, actions: Sequence[Action], facts: OpFacts, why: str) -> None:
        """Note that routines do not run at all."""
        for action in actions:
            self.refused.append((facts, action, why))
            if not self.written:
                self.report(f"{action} of {getattr(facts.op, 'name', facts.op)} ({facts.name})", why)
                action.tool.refused(action, why)

    def restless(self, action: Action) -> str:
        """Return the name of a value that a routine reads and that changes often; else "".

        Such a routine is not traced.
        """
        if action not in self._restless:
            self._restless[action] = self.history.restless(action)
        return self._restless[action]

    def tell_unfollowed(self) -> None:
        """Report what traceable routines read or set that the copy does not follow."""
        for what, reason in self.reads.unfollowed(self.traced):
            self.report(what, reason)

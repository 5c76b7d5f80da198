"""Ops of a graph: their analysis before the graph runs, and the routines that its rewritten copy calls.

In: every op of a graph, as `OpFacts` of symbols, which a driver passes to a `GraphAnalysis`.  Out: the
actions at each op; and an `Execution` for each run of the rewritten copy, whose number travels through the
graph, so that tools of one kind share one copy.
Called by drivers of graphs, and by `export`.

Beside `amanda.backend` a driver may import the names in `__all__`, where the framework stores the copies.
"""

from amanda.graph.driver import RewrittenCopy
from amanda.graph.execution import RoutineTable
from amanda.graph.reads import ReadPlace, ValueHistory

__all__ = ["ReadPlace", "RewrittenCopy", "RoutineTable", "ValueHistory"]

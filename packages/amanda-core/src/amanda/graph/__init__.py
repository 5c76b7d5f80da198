"""Ops of a graph: their analysis before it runs, and the routines that a rewritten copy of it calls.

In: every op of a graph, as `OpFacts` of symbols, which a driver brings to a `GraphAnalysis`.  Out: what is to
be inserted at which op; and an `Execution` for each run of the rewritten copy, whose number travels through
the graph, so that graphs of one structure share one copy.
Called by drivers of graphs, and by `export`.

Beside `amanda.backend` a driver may import what is in `__all__`, where the framework keeps the copies.
"""

from amanda.graph.driver import Copy
from amanda.graph.guards import History
from amanda.graph.insertion import Table
from amanda.graph.reads import Reading

__all__ = ["Copy", "History", "Reading", "Table"]

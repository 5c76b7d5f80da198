"""Ops of a graph: their analysis before it runs, and the routines that a rewritten copy of it calls.

A driver brings every op of a graph to a `GraphAnalysis`, rewrites a copy of the graph so that it calls
back at the places where there are actions, and makes an `Execution` for each time that the copy runs:
its number travels through the graph, so that graphs of one structure share one copy.
"""

from amanda._graph._analysis import GraphAnalysis
from amanda._graph._execution import Execution
from amanda._graph._insertion import Inserted, Rounds, Table

__all__ = ["Execution", "GraphAnalysis", "Inserted", "Rounds", "Table"]

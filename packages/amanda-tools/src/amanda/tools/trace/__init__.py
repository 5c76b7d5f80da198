"""Graph of the executed ops, forward and backward, and the tensors between them.

tracer = TraceTool()
with amanda.apply(tracer):
    model(x).sum().backward()
print(tracer.result)
tracer.result.save("graph.json")
"""

from amanda.tools.trace._graph import Graph, Op, Position, ProgramOp, Tensor
from amanda.tools.trace._result import TraceResult, load
from amanda.tools.trace._tool import GraphSoFar, TraceTool

__all__ = ["Graph", "GraphSoFar", "Op", "Position", "ProgramOp", "Tensor", "TraceResult", "TraceTool", "load"]

"""The engine of sessions and functions: analysis of operations, and edits of a copy of their nodes.

A mode makes a `Rewriting`, and a `Body` of what is to run; `rewrite` brings the operations to the tools, and
gives the edited nodes as a `Rewritten`, and the functions that they call in `Rewriting.library`.
"""

from ._backward import records
from ._body import DEFAULT_BUDGET, Body, Rewriting, Rewritten
from ._edited import NUMBER, copy_of, edited
from ._flow import enters
from ._function_body import body_of
from ._functions import Function, function_named, function_of
from ._generators import callees, draws
from ._locations import Location, Locations
from ._nodes import constant, either, new_node, placeholder
from ._reads import TensorFlowReads
from ._rewrite import rewrite
from ._slots import calling
from ._syntax import Edge, GraphSyntax
from ._values import GraphTensors, variable_of
from ._xla import RUNS_IN_XLA_ALONE, must_compile, runs_without_xla

__all__ = [
    "DEFAULT_BUDGET",
    "NUMBER",
    "RUNS_IN_XLA_ALONE",
    "Body",
    "Edge",
    "Function",
    "GraphSyntax",
    "GraphTensors",
    "Location",
    "Locations",
    "Rewriting",
    "Rewritten",
    "TensorFlowReads",
    "body_of",
    "callees",
    "calling",
    "constant",
    "copy_of",
    "draws",
    "edited",
    "either",
    "enters",
    "function_named",
    "function_of",
    "must_compile",
    "new_node",
    "placeholder",
    "records",
    "rewrite",
    "runs_without_xla",
    "variable_of",
]

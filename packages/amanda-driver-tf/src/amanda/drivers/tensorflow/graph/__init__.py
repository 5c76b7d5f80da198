"""The engine of sessions and functions: analysis of operations, and edits of copies of their nodes.

A mode creates a `Rewriting`, and a `Body` of the operations that run. `rewrite` brings the operations to the
tools, and returns the edited nodes as a `RewrittenBody`; the functions that these call are in
`Rewriting.library`.
"""

from ._body import DEFAULT_BUDGET, Body, Rewriting, RewrittenBody
from ._control_flow import loop_entries
from ._definitions import NUMBER, edited_definition, numbered_copy
from ._forward_map import records
from ._function_body import function_body
from ._functions import GraphFunction, function_named, function_of, ops_with_generators, with_callees
from ._locations import Location, Locations
from ._nodes import constant, control_trigger, new_node, placeholder
from ._rewrite import rewrite
from ._slots import running
from ._syntax import Edge, GraphSyntax
from ._values import GraphTensors, TensorFlowReads, variable_of
from ._xla import RUNS_IN_XLA_ALONE, must_compile, runs_without_xla

__all__ = [
    "DEFAULT_BUDGET",
    "NUMBER",
    "RUNS_IN_XLA_ALONE",
    "Body",
    "Edge",
    "GraphFunction",
    "GraphSyntax",
    "GraphTensors",
    "Location",
    "Locations",
    "Rewriting",
    "RewrittenBody",
    "TensorFlowReads",
    "constant",
    "control_trigger",
    "edited_definition",
    "function_body",
    "function_named",
    "function_of",
    "loop_entries",
    "must_compile",
    "new_node",
    "numbered_copy",
    "ops_with_generators",
    "placeholder",
    "records",
    "rewrite",
    "running",
    "runs_without_xla",
    "variable_of",
    "with_callees",
]

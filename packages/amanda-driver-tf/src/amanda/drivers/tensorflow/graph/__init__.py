"""The engine of sessions and functions: analysis of operations, and edits of copies of their nodes.

A mode creates a `TensorFlowRewriting`, and a `Body` of the operations that run. `rewrite` brings the
operations to the tools, and returns the edited nodes as a `RewrittenBody`; the functions that these call are
in `TensorFlowRewriting.library`.
"""

from ._body import DEFAULT_BUDGET, Body, RewrittenBody, TensorFlowRewriting
from ._control_flow import loop_entries
from ._definitions import NUMBER, edited_definition, numbered_copy
from ._facts import facts_of, grouped_outputs
from ._forward_map import forget_gradient_function, record_gradients
from ._function_body import function_body
from ._functions import (
    RUNS_IN_XLA_ALONE,
    RuntimeFunction,
    function_named,
    function_of,
    must_compile,
    ops_with_generators,
    runs_without_xla,
    with_callees,
)
from ._locations import Location, Locations
from ._nodes import Edge, GraphSyntax, constant, control_trigger, new_node, placeholder
from ._rewrite import rewrite
from ._slots import py_func, running
from ._values import GraphTensorOps, TensorFlowReads, variable_of

__all__ = [
    "DEFAULT_BUDGET",
    "NUMBER",
    "RUNS_IN_XLA_ALONE",
    "Body",
    "Edge",
    "GraphSyntax",
    "GraphTensorOps",
    "Location",
    "Locations",
    "RewrittenBody",
    "RuntimeFunction",
    "TensorFlowReads",
    "TensorFlowRewriting",
    "constant",
    "control_trigger",
    "edited_definition",
    "facts_of",
    "forget_gradient_function",
    "function_body",
    "function_named",
    "function_of",
    "grouped_outputs",
    "loop_entries",
    "must_compile",
    "new_node",
    "numbered_copy",
    "ops_with_generators",
    "placeholder",
    "py_func",
    "record_gradients",
    "rewrite",
    "running",
    "runs_without_xla",
    "variable_of",
    "with_callees",
]

"""The engine of sessions and functions: analysis of operations, and edits of copies of their nodes.

A mode creates a `TensorFlowRewriting`, and a `Body` of the operations that run. `rewrite` brings the
operations to the tools, and returns the edited nodes as a `RewrittenBody`; the functions that these call are
in `TensorFlowRewriting.library`.

ref: the spelling of a tensor in the inputs of a node, such as "x:1".
vanilla: of the user's graph, not of the edited copy.
number: the tensor with the number of the execution; in loops a vector of that number and the rounds.
ahead, behind: nodes that run before an operation, or after it.
saved value: a value of a routine in the forward pass that nodes of the backward pass read.
place: an operation's routines that share a node.  slot: the Python function of such a node.
pullback: a node that computes gradients of the inputs of routines from gradients of their outputs.
pass-through operation: one without gradient operations, since the gradient of its output is its input's, too.
"""

from ._body import DEFAULT_BUDGET, Body, RewrittenBody, TensorFlowRewriting
from ._control_flow import loop_entries
from ._definitions import NUMBER, edited_definition, numbered_copy
from ._facts import GraphTensorOps, TensorFlowReads, facts_of, variable_of
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
from ._sides import grouped_outputs
from ._slots import py_func, running

__all__ = [
    "DEFAULT_BUDGET", "NUMBER", "RUNS_IN_XLA_ALONE", "Body", "Edge", "GraphSyntax", "GraphTensorOps",
    "Location", "Locations", "RewrittenBody", "RuntimeFunction", "TensorFlowReads", "TensorFlowRewriting",
    "constant", "control_trigger", "edited_definition", "facts_of", "forget_gradient_function",
    "function_body", "function_named", "function_of", "grouped_outputs", "loop_entries", "must_compile",
    "new_node", "numbered_copy", "ops_with_generators", "placeholder", "py_func", "record_gradients",
    "rewrite", "running", "runs_without_xla", "variable_of", "with_callees",
]  # fmt: skip

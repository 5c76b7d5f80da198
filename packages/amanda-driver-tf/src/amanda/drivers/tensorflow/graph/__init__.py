"""The engine of session and function mode: analysis of operations, and edits of a copy of their nodes.

A mode makes a `Rewriting` (state, namespace) and a `Body` for the graph that is to run:
- `ops`: the `tf.Operation`s that run, in order (for a session the cone of fetches and targets; Placeholders
  may be among them), `nodes`: for each a NodeDef, a copy, by name; `identity`: `digest(...)` of what names
  the graph in every process; `syntax`: `GraphSyntax()` ("name:1") or `FunctionSyntax` ("name:output:1").
- `forward_of`: a `ForwardMap(ops)`: `records` noted while TensorFlow made gradients (`records.note(op,
  forward)`), then `_original_op`, then names (`forward_map.guessed` is not empty: say so in the report).
- `outputs`: `Edge`s that are fetched or returned; `number`: the input of the copy that carries the
  execution's number (an int64 scalar: in a session a hidden Placeholder); `number_at(op, ahead)` where it
  differs by frame; `alone(op)`: true where observers may not be packed with others (inside frames and
  branches of control flow of version 1); `functions(name)`: `function_named(name, graph)`.
`rewrite(body, rewriting)` gives `Rewritten`: all `nodes` to be imported, `outputs` as inputs to fetch,
`inserted`: names of nodes that have to run when an operation runs (targets), `removed`: of replaced
operations the node that runs instead (a target by that name becomes this one), `changed`: else the vanilla
graph may run. `rewriting.library`: FunctionDefs that the copy calls, inner ones first;
`rewriting.reports`: for `state.report(*entry)` at each execution; `tell_unfollowed()` completes them.
The copy is used while `rewriting.reads` hold: `GuardedCopies` keeps both, and `history` for the rewriting.

The caller runs `rewrite` in `context.eager_mode()` with instrumentation off, then
`rewriting.analysis.finish()`, or `.forget()` after an exception. For each run:
    execution = Execution(state, GraphTensors(), rewriting.table)
    with execution.under_way():          # raises a routine's own exception
        ... run the copy with execution.number fed ...
"""

from ._backward import ForwardMap, records
from ._body import DEFAULT_BUDGET, Body, Rewriting, Rewritten, constant_value
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
from ._syntax import Edge, FunctionSyntax, GraphSyntax
from ._values import GraphTensors, variable_of

__all__ = [
    "DEFAULT_BUDGET",
    "NUMBER",
    "Body",
    "Edge",
    "ForwardMap",
    "Function",
    "FunctionSyntax",
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
    "constant_value",
    "copy_of",
    "draws",
    "edited",
    "either",
    "enters",
    "function_named",
    "function_of",
    "new_node",
    "placeholder",
    "records",
    "rewrite",
    "variable_of",
]

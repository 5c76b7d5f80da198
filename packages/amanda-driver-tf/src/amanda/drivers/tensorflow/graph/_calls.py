"""Operations that call functions: rewritten functions take the execution's number as an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from amanda.backend import digest

from ._body import Body, RewrittenBody, TensorFlowRewriting, op_id
from ._definitions import add_loop_number, edited_definition, numbered_copy
from ._function_body import function_body
from ._functions import RUNS_IN_XLA_ALONE, must_compile, runs_without_xla
from ._nodes import INT64

if TYPE_CHECKING:
    from ._rewrite import BodyRewriter

_STATEFUL_TYPES = {
    "PartitionedCall": "StatefulPartitionedCall", "StatelessIf": "If", "StatelessWhile": "While",
    "StatelessCase": "Case",
}  # fmt: skip
_STATEFUL_TYPES |= {kind: kind for kind in _STATEFUL_TYPES.values()}
_FIRST_ARGUMENT = {"If": 1, "Case": 1}
"""Position of the first argument of the functions among an op's inputs, behind the predicate or index."""


class EditedCall(NamedTuple):
    """An operation whose functions were edited.

    number: the operation's last input, the execution's number; "" for a file, whose routines need none.
    backward: True if there are gradient operations in the functions.
    """

    number: str
    backward: bool


Rewrite = Callable[[Body, TensorFlowRewriting], RewrittenBody]


def rewrite_calls(rewriter: BodyRewriter, op: tf.Operation, rewrite: Rewrite) -> EditedCall | None:
    """Rewrite the functions that an operation calls; return None where nothing was inserted.

    A function that is out of reach, or that only XLA can run, is reported and stays.
    """
    body, rewriting = rewriter.body, rewriter.rewriting
    name = body.node_name(op)
    node = body.nodes[name]
    stateful_type = _STATEFUL_TYPES.get(node.op)
    callees = _function_references(node)
    if not callees:
        return None
    if stateful_type is None:
        rewriting.report(f"functions that {node.op} calls", "they run out of the graph's reach")
        return None
    offset = _FIRST_ARGUMENT.get(stateful_type, 0)

    def read_argument(position: int) -> Any:
        """Return the present value of an argument of the callee, or None for one beyond the inputs."""
        inputs = list(op.inputs)
        return body.read_value(inputs[position + offset]) if position + offset < len(inputs) else None

    def argument_variable(position: int) -> Any:
        """Return the variable that an argument of the callee was read from; None if there is none."""
        inputs = list(op.inputs)
        if position + offset >= len(inputs):
            return None
        outer = inputs[position + offset]
        # A loop variable has the value of a Variable in its first round alone.
        return None if stateful_type == "While" and outer.dtype != tf.resource else body.variable_of(outer)

    forward = body.forward_of(op)
    forward_id = None if forward is None else body.forward_id(forward)
    edited_callees = []
    for place, reference in callees:
        function = (rewriting.find_function or body.functions)(reference.name)
        if function is None:
            rewriting.report(f"function {reference.name}", "its definition is out of reach")
            return None
        # A trial needs present values, which a file does not have; below an XLA graph that passed, callees
        # pass.
        is_untried = not rewriting.written and not rewriting.runs_without_xla
        is_compiled = is_untried and (must_compile(node) or must_compile(function.definition))
        if forward in rewriting.compiled or (is_compiled and not runs_without_xla(function, read_argument)):
            # The gradients of the op have to stay with XLA, too.
            rewriting.compiled.add(op)
            rewriting.report(f"the ops of {reference.name}", RUNS_IN_XLA_ALONE)
            return None
        # A function that is called at several places has other ids at each.
        identity = digest(op_id(body, op.name), place)
        inner = function_body(
            function, identity, rewriting, read_argument, argument_variable, caller=(body, op),
            within=body.place_of(op).within, apart=rewriting.differentiated,
            forward=(forward, rewriting.callees.get(forward, {}).get(place)),
            forward_identity=None if forward_id is None else digest(forward_id, place),
        )  # fmt: skip
        rewriting.callees.setdefault(op, {})[place] = function.graph
        edited_callees.append((place, reference, function, inner, rewrite(inner, rewriting)))
    if not any(rewritten.changed for *_, rewritten in edited_callees):
        return None
    backward = any(rewritten.backward for *_, rewritten in edited_callees)
    if rewriting.written:
        for _, reference, function, _, rewritten in edited_callees:
            copy = edited_definition(function.definition, rewritten)
            rewriting.library.append(copy)
            reference.name = copy.signature.name
            node.op = stateful_type if copy.signature.is_stateful else node.op
        return EditedCall("", backward)
    if any(
        must_compile(holder)
        for holder in (node, *(function.definition for _, _, function, *_ in edited_callees))
    ):
        rewriting.report(f"jit_compile of what {op.name} calls", "in a scope it runs without XLA")
    number, step = body.number_at(op, ahead=True), 0
    if stateful_type == "While":
        number, step = add_loop_number(rewriter, op, number)
    for place, reference, function, inner, rewritten in edited_callees:
        round_step = step if place == "body" else 0
        copy = numbered_copy(
            function.definition, rewritten, inner, round_step, stateful_type == "While" and place == "cond"
        )
        rewriting.library.append(copy)
        reference.name = copy.signature.name
    _add_number_argument(node, stateful_type, body.depth_of(op) + 1)
    # The number is another output of a loop, so the cached layout of the node is stale.
    if hasattr(body.syntax, "forget"):
        body.syntax.forget(name)
    return EditedCall(number, backward)


def _function_references(node: Any) -> list[tuple[str, Any]]:
    """Return the references to functions among a node's attributes, each with its place there."""
    references: list[tuple[str, Any]] = []
    for key in sorted(node.attr):
        value = node.attr[key]
        kind = value.WhichOneof("value")
        if kind == "func" and value.func.name:
            references.append((key, value.func))
        elif kind == "list":
            references += [(f"{key}{i}", function) for i, function in enumerate(value.list.func)]
    return references


def _add_number_argument(node: Any, kind: str, depth: int) -> None:
    """Make a call take the number as its last argument, and be stateful, so that TensorFlow keeps it.

    depth: number of loops around the body of a loop.
    """
    node.op = kind
    node.attr["T" if kind == "While" else "Tin"].list.type.append(INT64)
    if kind == "While" and node.attr["output_shapes"].list.shape:
        # The number is a loop variable, a vector with an element for each loop around the body.
        node.attr["output_shapes"].list.shape.add().dim.add(size=1 + depth)
    # XLA cannot compile calls of Python.
    node.attr.pop("_XlaMustCompile", None)

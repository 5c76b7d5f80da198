"""Operations that call functions: the functions are rewritten too, and take the execution's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from amanda.backend import digest

from ._body import Body, Rewriting, Rewritten, op_id
from ._edited import copy_of, edited
from ._function_body import body_of
from ._nodes import INT64
from ._rounds import enter
from ._xla import RUNS_IN_XLA_ALONE, must_compile, runs_without_xla

if TYPE_CHECKING:
    from ._rewrite import Rewriter

_STATEFUL = {"PartitionedCall": "StatefulPartitionedCall", "StatelessIf": "If", "StatelessWhile": "While",
             "StatelessCase": "Case"}  # fmt: skip
_STATEFUL |= {kind: kind for kind in _STATEFUL.values()}
_FIRST_ARGUMENT = {"If": 1, "Case": 1}


class Called(NamedTuple):
    """An operation whose functions were edited.

    number: its last input, the execution's number; "" where routines are inlined for good.
    backward: whether there are gradient operations in the functions.
    """

    number: str
    backward: bool


Rewrite = Callable[[Body, Rewriting], Rewritten]


def rewrite_calls(rewriter: Rewriter, op: tf.Operation, rewrite: Rewrite) -> Called | None:
    """Rewrite the functions that an operation calls; return None where nothing was inserted."""
    body, rewriting = rewriter.body, rewriter.rewriting
    name = body.node_name(op)
    node = body.nodes[name]
    kind = _STATEFUL.get(node.op)
    callees = _callees(node)
    if not callees:
        return None
    if kind is None:
        rewriting.report(f"functions that {node.op} calls", "they run out of the graph's reach")
        return None
    offset = _FIRST_ARGUMENT.get(kind, 0)

    def read_argument(position: int) -> Any:
        given = list(op.inputs)
        return body.read_value(given[position + offset]) if position + offset < len(given) else None

    def argument_variable(position: int) -> Any:
        given = list(op.inputs)
        if position + offset >= len(given):
            return None
        outer = given[position + offset]
        # What goes round in a loop is what the variable held in its first round alone.
        return None if kind == "While" and outer.dtype != tf.resource else body.variable_of(outer)

    forward = body.forward_of(op)
    forward_id = None if forward is None else body.forward_id(forward)
    found = []
    for place, reference in callees:
        function = (rewriting.find or body.functions)(reference.name)
        if function is None:
            rewriting.report(f"function {reference.name}", "its definition is out of reach")
            return None
        is_untried = not rewriting.written and not rewriting.runs_without_xla
        is_compiled = is_untried and (must_compile(node) or must_compile(function.definition))
        if forward in rewriting.compiled or (is_compiled and not runs_without_xla(function, read_argument)):
            rewriting.compiled.add(op)
            rewriting.report(f"the ops of {reference.name}", RUNS_IN_XLA_ALONE)
            return None
        identity = digest(op_id(body, op.name), place)
        inner = body_of(
            function, identity, rewriting, read_argument, argument_variable, caller=(body, op),
            within=body.place_of(op).within, apart=rewriting.differentiated,
            forward=(forward, rewriting.callees.get(forward, {}).get(place)),
            forward_identity=None if forward_id is None else digest(forward_id, place),
        )  # fmt: skip
        rewriting.callees.setdefault(op, {})[place] = function.graph
        found.append((place, reference, function, inner, rewrite(inner, rewriting)))
    if not any(rewritten.changed for *_, rewritten in found):
        return None
    backward = any(rewritten.backward for *_, rewritten in found)
    if rewriting.written:
        for _, reference, function, _, rewritten in found:
            copy = edited(function.definition, rewritten)
            rewriting.library.append(copy)
            reference.name = copy.signature.name
            node.op = kind if copy.signature.is_stateful else node.op
        return Called("", backward)
    if any(must_compile(one) for one in (node, *(function.definition for _, _, function, *_ in found))):
        rewriting.report(f"jit_compile of what {op.name} calls", "in a scope it runs without XLA")
    number, step = body.number_at(op, True), 0
    if kind == "While":
        number, step = enter(rewriter, op, number)
    for place, reference, function, inner, rewritten in found:
        turn = step if place == "body" else 0
        copy = copy_of(function.definition, rewritten, inner, turn, kind == "While" and place == "cond")
        rewriting.library.append(copy)
        reference.name = copy.signature.name
    _add_number_argument(node, kind, body.depth_of(op) + 1)
    if hasattr(body.syntax, "forget"):
        body.syntax.forget(name)
    return Called(number, backward)


def _callees(node: Any) -> list[tuple[str, Any]]:
    """References to functions among a node's attributes, with the place of each."""
    found: list[tuple[str, Any]] = []
    for key in sorted(node.attr):
        value = node.attr[key]
        kind = value.WhichOneof("value")
        if kind == "func" and value.func.name:
            found.append((key, value.func))
        elif kind == "list":
            found += [(f"{key}{i}", one) for i, one in enumerate(value.list.func)]
    return found


def _add_number_argument(node: Any, kind: str, depth: int) -> None:
    """Make a call take the number as its last argument, and be one that TensorFlow leaves in place.

    depth: how many loops are around what a loop calls.
    """
    node.op = kind
    node.attr["T" if kind == "While" else "Tin"].list.type.append(INT64)
    if kind == "While" and node.attr["output_shapes"].list.shape:
        node.attr["output_shapes"].list.shape.add().dim.add(size=1 + depth)
    node.attr.pop("_XlaMustCompile", None)

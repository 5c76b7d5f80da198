"""Operations that call functions, such as While: rewritten functions take the execution's number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from amanda.backend import digest

from ._body import Body, RewrittenBody, TensorFlowRewriting, op_id
from ._definitions import add_loop_number, edited_definition, numbered_copy
from ._function_body import function_body
from ._functions import RUNS_IN_XLA_ALONE, RuntimeFunction, must_compile, runs_without_xla
from ._nodes import INT64

if TYPE_CHECKING:
    from ._rewrite import BodyRewriter

_STATEFUL_TYPES = {
    "PartitionedCall": "StatefulPartitionedCall", "StatelessIf": "If", "StatelessWhile": "While",
    "StatelessCase": "Case",
}  # fmt: skip
_STATEFUL_TYPES |= {op_type: op_type for op_type in _STATEFUL_TYPES.values()}
_FIRST_ARGUMENT = {"If": 1, "Case": 1}
"""Position of the first argument of the functions among an op's inputs, behind the predicate or index."""


class EditedCall(NamedTuple):
    """An operation whose functions were edited.

    number_ref: ref of the operation's last input, the execution's number; "" for a file, which has none.
    has_backward_ops: True if there are gradient operations in the functions.
    """

    number_ref: str
    has_backward_ops: bool


class _RewrittenCallee(NamedTuple):
    """A function that an operation calls.

    attribute_name: of the attribute that refers to the function, such as "body".
    reference: the value of that attribute.
    """

    attribute_name: str
    reference: Any
    function: RuntimeFunction
    body: Body
    rewritten: RewrittenBody


Rewrite = Callable[[Body, TensorFlowRewriting], RewrittenBody]


def rewrite_calls(rewriter: BodyRewriter, op: tf.Operation, rewrite: Rewrite) -> EditedCall | None:
    """Rewrite the functions that an operation calls; return None where nothing was inserted.

    The operation's node then calls the edited functions, which are in the library. A function that is out of
    reach, or that only XLA can run, is reported; then all of them stay.
    """
    rewriting = rewriter.rewriting
    node = rewriter.body.nodes[rewriter.body.node_name(op)]
    references = _function_references(node)
    if not references:
        return None
    stateful_type = _STATEFUL_TYPES.get(node.op)
    if stateful_type is None:
        rewriting.report(f"functions that {node.op} calls", "they run out of the graph's reach")
        return None
    arguments = _Arguments(rewriter.body, op, stateful_type)
    callees = []
    for attribute_name, reference in references:
        callee = _rewrite_callee(rewriter, op, attribute_name, reference, arguments, rewrite)
        if callee is None:
            return None
        callees.append(callee)
    if not any(callee.rewritten.is_changed for callee in callees):
        return None
    has_backward_ops = any(callee.rewritten.has_backward_ops for callee in callees)
    if rewriting.is_for_file:
        _call_edited_functions(node, stateful_type, callees, rewriting)
        return EditedCall(number_ref="", has_backward_ops=has_backward_ops)
    number_ref = _call_numbered_functions(rewriter, op, stateful_type, callees)
    return EditedCall(number_ref, has_backward_ops)


class _Arguments:
    """The arguments of the functions that an operation calls, by their position in such a function."""

    def __init__(self, body: Body, op: tf.Operation, stateful_type: str) -> None:
        self._body = body
        self._op = op
        self._is_loop = stateful_type == "While"
        self._first = _FIRST_ARGUMENT.get(stateful_type, 0)

    def value(self, position: int) -> Any:
        """Return the present value of an argument; None for a position behind the last."""
        tensor = self._tensor(position)
        return None if tensor is None else self._body.read_value(tensor)

    def variable(self, position: int) -> Any:
        """Return the variable that an argument was read from; None if there is none."""
        tensor = self._tensor(position)
        # A loop variable has the value of a Variable in its first round alone.
        if tensor is None or (self._is_loop and tensor.dtype != tf.resource):
            return None
        return self._body.variable_of(tensor)

    def _tensor(self, position: int) -> Any:
        inputs = list(self._op.inputs)[self._first :]
        return inputs[position] if position < len(inputs) else None


def _rewrite_callee(
    rewriter: BodyRewriter,
    op: tf.Operation,
    attribute_name: str,
    reference: Any,
    arguments: _Arguments,
    rewrite: Rewrite,
) -> _RewrittenCallee | None:
    """Rewrite a function that an operation calls; return None, with a report, where that is impossible.

    Records the function's graph for gradients of the call, and an operation that XLA alone can run.
    """
    body, rewriting = rewriter.body, rewriter.rewriting
    function = (rewriting.find_function or body.find_function)(reference.name)
    if function is None:
        rewriting.report(f"function {reference.name}", "its definition is out of reach")
        return None
    forward = body.forward_of(op)
    if forward in rewriting.ops_for_xla_alone or _needs_xla(rewriter, op, function, arguments):
        rewriting.ops_for_xla_alone.add(op)
        rewriting.report(f"the ops of {reference.name}", RUNS_IN_XLA_ALONE)
        return None
    forward_id = None if forward is None else body.forward_id(forward)
    # A function that is called at several places has other ids at each.
    callee_identity = digest(op_id(body, op.name), attribute_name)
    callee_body = function_body(
        function, callee_identity, rewriting, arguments.value, arguments.variable, caller=(body, op),
        enclosing_layers=body.location_of(op).enclosing_layers,
        has_gradients_elsewhere=rewriting.is_differentiated, forward_call=forward,
        forward_graph=rewriting.callee_graphs_by_op.get(forward, {}).get(attribute_name),
        forward_identity=None if forward_id is None else digest(forward_id, attribute_name),
    )  # fmt: skip
    rewriting.callee_graphs_by_op.setdefault(op, {})[attribute_name] = function.graph
    return _RewrittenCallee(attribute_name, reference, function, callee_body, rewrite(callee_body, rewriting))


def _needs_xla(
    rewriter: BodyRewriter, op: tf.Operation, function: RuntimeFunction, arguments: _Arguments
) -> bool:
    """Return True for a function with jit_compile=True that fails without XLA in a trial, which runs it.

    False without a trial: for a file, and within a function that runs without XLA.
    """
    # A trial needs present values, which a file does not have.
    if rewriter.rewriting.is_for_file or rewriter.rewriting.runs_without_xla:
        return False
    node = rewriter.body.nodes[rewriter.body.node_name(op)]
    is_compiled = must_compile(node) or must_compile(function.definition)
    return is_compiled and not runs_without_xla(function, arguments.value)


def _call_edited_functions(
    node: Any, stateful_type: str, callees: Sequence[_RewrittenCallee], rewriting: TensorFlowRewriting
) -> None:
    """Make a node of a file call edited functions, which are added to the library; stateful if one is."""
    for callee in callees:
        copy = edited_definition(callee.function.definition, callee.rewritten)
        rewriting.library.append(copy)
        callee.reference.name = copy.signature.name
        if copy.signature.is_stateful:
            node.op = stateful_type


def _call_numbered_functions(
    rewriter: BodyRewriter, op: tf.Operation, stateful_type: str, callees: Sequence[_RewrittenCallee]
) -> str:
    """Make an operation call edited functions that take the execution's number; return the number's ref.

    The functions are added to the library.  Reports jit_compile, which the functions lose.
    """
    body, rewriting = rewriter.body, rewriter.rewriting
    name = body.node_name(op)
    node = body.nodes[name]
    if any(must_compile(holder) for holder in (node, *(callee.function.definition for callee in callees))):
        rewriting.report(f"jit_compile of what {op.name} calls", "in a scope it runs without XLA")
    is_loop = stateful_type == "While"
    number_ref, round_increment = body.number_ref_at(op, ahead=True), 0
    if is_loop:
        number_ref, round_increment = add_loop_number(rewriter, op, number_ref)
    for callee in callees:
        copy = numbered_copy(
            callee.function.definition, callee.rewritten, callee.body,
            round_increment=round_increment if callee.attribute_name == "body" else 0,
            is_condition=is_loop and callee.attribute_name == "cond",
        )  # fmt: skip
        rewriting.library.append(copy)
        callee.reference.name = copy.signature.name
    _add_number_argument(node, stateful_type, body.loop_depth_of(op) + 1)
    # The number is another output of a loop, so the cached layout of the node is stale.
    if hasattr(body.syntax, "forget"):
        body.syntax.forget(name)
    return number_ref


def _function_references(node: Any) -> list[tuple[str, Any]]:
    """Return the references to functions among a node's attributes, each with that name (and an index)."""
    references: list[tuple[str, Any]] = []
    for name in sorted(node.attr):
        value = node.attr[name]
        field_name = value.WhichOneof("value")
        if field_name == "func" and value.func.name:
            references.append((name, value.func))
        elif field_name == "list":
            references += [(f"{name}{i}", function) for i, function in enumerate(value.list.func)]
    return references


def _add_number_argument(node: Any, stateful_type: str, depth: int) -> None:
    """Make a call take the number as its last argument, and be stateful, so that TensorFlow keeps the call.

    XLA does not compile the call any more.

    depth: number of loops around the body of a loop.
    """
    node.op = stateful_type
    node.attr["T" if stateful_type == "While" else "Tin"].list.type.append(INT64)
    if stateful_type == "While" and node.attr["output_shapes"].list.shape:
        # The number is a loop variable, a vector with an element for each loop around the body.
        node.attr["output_shapes"].list.shape.add().dim.add(size=1 + depth)
    # XLA cannot compile calls of Python.
    node.attr.pop("_XlaMustCompile", None)

"""The body of a function: its nodes that run, and the values and captured tensors of its symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops, tensor_util

from ._body import Body, TensorFlowRewriting
from ._definitions import LOOPS, NUMBER, captured_lookup
from ._facts import eager_computation, variable_of
from ._forward_map import ForwardMap
from ._functions import RuntimeFunction, executed_nodes, function_named
from ._locations import Locations
from ._nodes import FunctionSyntax

_BRANCH_OPS = ("If", "StatelessIf", "Case", "StatelessCase")

CaptureLookup = Callable[[Any], Any]
"""Returns the symbol of another graph that a symbol of a graph stands for; None for others."""


def function_body(
    function: RuntimeFunction,
    identity: int,
    rewriting: TensorFlowRewriting,
    read_argument: Callable[[int], Any],
    argument_variable: Callable[[int], Any] | None = None,
    *,
    caller: tuple[Body, tf.Operation] | None = None,
    enclosing_layers: Sequence[Any] = (),
    has_gradients_elsewhere: bool = False,
    forward_call: tf.Operation | None = None,
    forward_graph: Any = None,
    forward_identity: int | None = None,
    is_backward: bool = False,
) -> Body:
    """Return the nodes of a function that run, as a body; report forward operations that are guesses.

    read_argument: returns the present value of an argument, by position.
    argument_variable: returns the holder of the variable whose handle is an argument; by default the
    argument.
    caller: the body with the operation that calls this function, and that operation.
    enclosing_layers: the layers around the call.
    has_gradients_elsewhere: True if gradients of the function may be in other graphs.
    forward_call: for a call that computes gradients of another call, that other call.
    forward_graph: the graph of the function of that call; by default the graph whose tensors are captured.
    forward_identity: identity of the forward graph, if that is another graph.
    is_backward: True for a backward function.
    """
    definition, graph = function.definition, function.graph
    # TensorFlow prunes the other nodes when it runs the function, so tools must not see them.
    executed_names = executed_nodes(definition)
    nodes = {node.name: node for node in definition.node_def if node.name in executed_names}
    syntax = FunctionSyntax([*function.arguments, NUMBER], nodes)
    node_names = function.names
    operations = graph.get_operations()
    find_captured_by_caller, loop_depth = None, 0
    if caller is not None:
        calling_body, call = caller
        find_captured_by_caller = calling_body.find_captured
        loop_depth = calling_body.loop_depth_of(call) + (call.type in LOOPS)
    is_branch = forward_call is not None and forward_call.type in _BRANCH_OPS and forward_graph is not None
    forward_branch = (forward_call, forward_graph) if is_branch else None
    find_captured = _capture_lookup(graph, forward_branch, find_captured_by_caller)
    forward_of = ForwardMap(
        operations, _operations_of_forward_graph(forward_graph, find_captured, operations), find_captured,
        forward_call, forward_is_elsewhere=is_backward,
    )  # fmt: skip
    # A file keeps its backward ops as they are, whichever forward ops they belong to.
    if forward_of.guessed and not rewriting.is_for_file:
        _report_guesses(function.name, operations, forward_of, rewriting)
    find_variable = _variable_lookup(graph, argument_variable or read_argument)
    return Body(
        ops=[op for op in operations if node_names.get(op.name) in nodes], nodes=nodes, syntax=syntax,
        number_ref=NUMBER, identity=identity, forward_of=forward_of,
        outputs=[syntax.parse(definition.ret[arg.name]) for arg in definition.signature.output_arg],
        find_captured=find_captured, node_name=lambda op: node_names.get(op.name, op.name),
        read_value=_ValueReader(graph, read_argument), find_function=lambda name: function_named(name, graph),
        has_gradients_elsewhere=has_gradients_elsewhere, is_backward=is_backward, loop_depth=loop_depth,
        is_called=caller is not None,
        gradient_order_of=forward_of.order, has_guessed_forwards=bool(forward_of.guessed),
        variable_of=find_variable,
        location_of=Locations(rewriting.layer_index, graph, find_variable, enclosing_layers),
        forward_identity=forward_identity,
    )  # fmt: skip


def _report_guesses(
    function_name: str,
    operations: Sequence[tf.Operation],
    forward_of: ForwardMap,
    rewriting: TensorFlowRewriting,
) -> None:
    """Report that forward operations of gradients are guesses, and custom gradients that no guess names."""
    rewriting.report(
        f"the backward ops of {function_name}",
        "it was traced or loaded outside of any scope, so names tell which forward ops they belong to",
    )
    mapped_forwards = {forward_of(op) for op in operations}
    for op in operations:
        if _has_custom_gradient(op) and op not in mapped_forwards:
            rewriting.report(
                f"the custom gradient at {op.name} of {function_name}",
                "it was traced or loaded outside of any scope, and no name tells which ops compute it",
            )


def _has_custom_gradient(op: tf.Operation) -> bool:
    """Return True for the IdentityN that `tf.custom_gradient` puts behind a function."""
    if op.type != "IdentityN":
        return False
    kind: bytes = op.node_def.attr["_gradient_op_type"].s
    return kind.startswith(b"CustomGradient")


def _capture_lookup(
    graph: Any, forward_branch: tuple[Any, Any] | None, find_captured_by_caller: CaptureLookup | None
) -> CaptureLookup:
    """Return a lookup of the symbol of another graph that a symbol of this graph stands for.

    That symbol is captured by a placeholder; or a loop of gradients pops it off a list, onto which the rounds
    of the forward loop pushed it; or the gradients of a branch read it from an optional, which is empty if
    the branch was not taken.
    forward_branch: operation and graph of the forward branch of a branch of gradients; else None.
    find_captured_by_caller: the lookup of the graph that calls this one.
    """
    find_placeholder_capture = captured_lookup(graph)

    def find_capture_or_branch_output(tensor: Any) -> Any:
        """Return the forward branch's output that a symbol stands for, or else the captured symbol."""
        captured_tensor = find_placeholder_capture(tensor)
        if forward_branch is None:
            return captured_tensor
        branch_op, branch_graph = forward_branch
        # The output of the branch may be captured through several calling graphs.
        outer_tensor = captured_tensor
        while outer_tensor is not None:
            if outer_tensor.op is branch_op:
                return branch_graph.outputs[outer_tensor.value_index]
            outer_tensor = None if find_captured_by_caller is None else find_captured_by_caller(outer_tensor)
        return captured_tensor

    def find_captured(tensor: Any) -> Any:
        """Return the symbol of another graph that a symbol stands for; None if there is none."""
        op = tensor.op
        # Loops of gradients pop what the rounds of the forward loop have pushed.
        if op.type == "TensorListPopBack" and tensor.value_index == 1:
            return _stored_tensor(find_placeholder_capture(op.inputs[0]), "TensorListPushBack", 1)
        # Gradients of a branch read its values from optionals, which are empty if the branch was not taken.
        if op.type == "OptionalGetValue":
            optional = find_capture_or_branch_output(op.inputs[0])
            return _stored_tensor(optional, "OptionalFromValue", tensor.value_index)
        return find_capture_or_branch_output(tensor)

    return find_captured


def _stored_tensor(holder: Any, op_type: str, index: int) -> Any:
    """Return the tensor that an operation of this type stores in `holder`; None for other types."""
    return holder.op.inputs[index] if holder is not None and holder.op.type == op_type else None


def _operations_of_forward_graph(
    graph: Any, find_captured: CaptureLookup, operations: Sequence[tf.Operation]
) -> Mapping[str, tf.Operation] | None:
    """Return the operations of a forward graph by name; None without a graph.

    graph: if None, the graph of the first tensor that a placeholder among `operations` captures.
    """
    if graph is None:
        placeholders = (op.outputs[0] for op in operations if op.type == "Placeholder" and op.outputs)
        captured_tensors = (find_captured(placeholder) for placeholder in placeholders)
        graph = next((tensor.graph for tensor in captured_tensors if tensor is not None), None)
    return None if graph is None else {op.name: op for op in graph.get_operations()}


class _ValueReader:
    """Reads the present values of a function's symbols, from constants, arguments and variables."""

    def __init__(self, graph: Any, read_argument: Callable[[int], Any]) -> None:
        self._read_argument = read_argument
        self._positions = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}

    def __call__(self, tensor: Any) -> Any:
        """Return the present value of a symbol as an eager tensor, or the symbol if no value is known.

        Runs the ops that read a variable, and those that cast, reshape or slice a value.
        """
        op = tensor.op
        if op.name in self._positions and op.type == "Placeholder":
            value = self._read_argument(self._positions[op.name])
            return tensor if value is None else value
        if op.type in ("Identity", "Cast", "ReadVariableOp"):
            value = self(op.inputs[0])
            if not isinstance(value, ops.EagerTensor):
                return tensor
            if op.type == "ReadVariableOp":
                # The Variable object may be out of reach, while its handle is an argument.
                return tf.raw_ops.ReadVariableOp(resource=value, dtype=tensor.dtype)
            return tf.cast(value, tensor.dtype)
        if op.type in ("Reshape", "Transpose"):
            value, parameters = self(op.inputs[0]), tensor_util.constant_value(op.inputs[1])
            if not isinstance(value, ops.EagerTensor) or parameters is None:
                return tensor
            return tf.reshape(value, parameters) if op.type == "Reshape" else tf.transpose(value, parameters)
        if op.type in ("ExpandDims", "Squeeze", "StridedSlice"):
            values = [self(operand) for operand in op.inputs]
            are_eager = all(isinstance(operand_value, ops.EagerTensor) for operand_value in values)
            return eager_computation(op)(values) if are_eager else tensor
        value = tensor_util.constant_value(tensor)
        return tensor if value is None else tf.convert_to_tensor(value, tensor.dtype)


def _variable_lookup(graph: Any, argument_variable: Callable[[int], Any]) -> Callable[[Any], Any]:
    """Return a lookup of the holder of the variable that a function's symbol was read from; None without one.

    argument_variable: function of an argument's position that returns the holder of its variable.
    """
    position_by_name = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}

    def find_variable_of_placeholder(placeholder: Any) -> Any:
        """Return the holder of the variable that a placeholder's argument was read from; None without one."""
        position = position_by_name.get(placeholder.op.name)
        holder = None if position is None else argument_variable(position)
        # An eager argument that is no handle is a value of the call, not a variable.
        is_plain_value = isinstance(holder, ops.EagerTensor) and holder.dtype != tf.resource
        return None if is_plain_value else holder

    return lambda tensor: variable_of(tensor, find_variable_of_placeholder)

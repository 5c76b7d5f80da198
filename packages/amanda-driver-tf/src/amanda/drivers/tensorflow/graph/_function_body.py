"""The body of a function: its nodes that run, and what the symbols of its graph stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops, tensor_util

from ._backward import ForwardMap
from ._body import Body, Rewriting
from ._edited import NUMBER
from ._functions import Function, executed, function_named
from ._locations import Locations
from ._original import original
from ._rounds import LOOPS, captured_by
from ._syntax import FunctionSyntax
from ._values import variable_of

_BRANCHING = ("If", "StatelessIf", "Case", "StatelessCase")

Captured = Callable[[Any], Any]
"""Of a symbol of a graph, the one of another graph that it stands for; None of others."""


def body_of(
    function: Function,
    identity: int,
    rewriting: Rewriting,
    read_argument: Callable[[int], Any],
    argument_variable: Callable[[int], Any] | None = None,
    *,
    caller: tuple[Body, tf.Operation] | None = None,
    within: Sequence[Any] = (),
    apart: bool = False,
    forward: tuple[tf.Operation | None, Any] = (None, None),
    forward_identity: int | None = None,
    backward: bool = False,
) -> Body:
    """The nodes of a function that run.

    read_argument: the present value of an argument, by position.
    argument_variable: what holds the variable that an argument is the handle of; the argument by default.
    caller: the body with the operation that calls this function, and that operation.
    within: the layers that the call lies in.
    forward: where this is called for the gradients of a call, that one, and the graph that this one has
    gradients of, where it does not capture its tensors.
    forward_identity: that of the graph that this one has gradients of, if it is another.
    backward: whether this is the backward function of another.
    """
    definition, graph = function.definition, function.graph
    run = executed(definition)
    nodes = {node.name: node for node in definition.node_def if node.name in run}
    syntax = FunctionSyntax([*function.arguments, NUMBER], nodes)
    names = function.names
    everything = graph.get_operations()
    outer, depth = None, 0
    if caller is not None:
        outer, depth = caller[0].captured, caller[0].depth_of(caller[1]) + (caller[1].type in LOOPS)
    branches = forward[0] is not None and forward[1] is not None and forward[0].type in _BRANCHING
    held = _captured(graph, forward if branches else None, outer)
    forward_ops = _forward_operations(held, everything, forward[1])
    forwards = ForwardMap(everything, forward_ops, held, forward[0], backward)
    if forwards.guessed and not rewriting.written:
        rewriting.report(
            f"the backward ops of {function.name}",
            "it was traced or loaded outside of any scope, so names tell which forward ops they belong to",
        )
        known = set(filter(None, map(forwards, everything)))
        for op in everything:
            if _has_custom_gradient(op) and op not in known:
                rewriting.report(
                    f"the custom gradient at {op.name} of {function.name}",
                    "it was traced or loaded outside of any scope, and no name tells which ops compute it",
                )
    holding = _holding(graph, argument_variable or read_argument)
    return Body(
        [op for op in everything if names.get(op.name) in nodes],
        nodes, syntax, NUMBER, identity, forwards,
        [syntax.parse(definition.ret[arg.name]) for arg in definition.signature.output_arg],
        held, lambda op: names.get(op.name, op.name), _Reading(graph, read_argument),
        lambda name: function_named(name, graph), apart=apart, backward=backward, depth=depth,
        order_of=forwards.order, guessed=bool(forwards.guessed),
        variable_of=holding, place_of=Locations(rewriting.layers, graph, holding, within),
        forward_identity=forward_identity,
    )  # fmt: skip


def _has_custom_gradient(op: tf.Operation) -> bool:
    """Return True if an operation is the IdentityN that `tf.custom_gradient` puts behind a function."""
    if op.type != "IdentityN":
        return False
    kind: bytes = op.node_def.attr["_gradient_op_type"].s
    return kind.startswith(b"CustomGradient")


def _captured(graph: Any, branch: Any, outer: Captured | None) -> Captured:
    """For a placeholder of a graph, the symbol of another graph that it stands for.

    So too for what a loop of gradients takes of what the rounds of another loop have accumulated, and for
    what the gradients of a branch take of it: the call gives that, in an optional, which is empty where the
    branch was not taken.
    branch: the operation and graph of the branch that this one has gradients of; None of others.
    outer: the same of the graph that calls this one.
    """
    held_by = captured_by(graph)

    def of_branch(tensor: Any) -> Any:
        """Return what the branch gives that a symbol stands for; another graph's where it gives none."""
        given = held_by(tensor)
        at = given
        while branch is not None and at is not None:
            if at.op is branch[0]:
                return branch[1].outputs[at.value_index]
            at = None if outer is None else outer(at)
        return given

    def held(tensor: Any) -> Any:
        op = tensor.op
        if op.type == "TensorListPopBack" and tensor.value_index == 1:
            return _put_into(held_by(op.inputs[0]), "TensorListPushBack", 1)
        if op.type == "OptionalGetValue":
            return _put_into(of_branch(op.inputs[0]), "OptionalFromValue", tensor.value_index)
        return of_branch(tensor)

    return held


def _put_into(holder: Any, kind: str, index: int) -> Any:
    """The tensor that an operation of that kind puts into what holds it; None of others."""
    return holder.op.inputs[index] if holder is not None and holder.op.type == kind else None


def _forward_operations(
    captured: Captured, everything: Sequence[tf.Operation], graph: Any
) -> Mapping[str, tf.Operation] | None:
    """The operations of the graph that this one captures tensors of; None where it captures none."""
    for op in everything:
        held = captured(op.outputs[0]) if op.type == "Placeholder" and op.outputs else None
        if held is not None and graph is None:
            graph = held.graph
    return None if graph is None else {one.name: one for one in graph.get_operations()}


class _Reading:
    """Present values of a function's symbols: constants, arguments, variables."""

    def __init__(self, graph: Any, read_argument: Callable[[int], Any]) -> None:
        self._read_argument = read_argument
        self._positions = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}

    def __call__(self, tensor: Any) -> Any:
        op = tensor.op
        if op.name in self._positions and op.type == "Placeholder":
            value = self._read_argument(self._positions[op.name])
            return tensor if value is None else value
        if op.type in ("Identity", "Cast", "ReadVariableOp"):
            value = self(op.inputs[0])
            if not isinstance(value, ops.EagerTensor):
                return tensor
            if op.type == "ReadVariableOp":
                return tf.raw_ops.ReadVariableOp(resource=value, dtype=tensor.dtype)
            return tf.cast(value, tensor.dtype)
        if op.type in ("Reshape", "Transpose"):
            value, form = self(op.inputs[0]), tensor_util.constant_value(op.inputs[1])
            if not isinstance(value, ops.EagerTensor) or form is None:
                return tensor
            return tf.reshape(value, form) if op.type == "Reshape" else tf.transpose(value, form)
        if op.type in ("ExpandDims", "Squeeze", "StridedSlice"):
            values = [self(given) for given in op.inputs]
            known = all(isinstance(one, ops.EagerTensor) for one in values)
            return original(op)(values) if known else tensor
        value = tensor_util.constant_value(tensor)
        return tensor if value is None else tf.convert_to_tensor(value, tensor.dtype)


def _holding(graph: Any, argument_variable: Callable[[int], Any]) -> Callable[[Any], Any]:
    """Return a function that gives what holds the variables that a function's symbols were read of."""
    positions = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}

    def argument(placeholder: Any) -> Any:
        position = positions.get(placeholder.op.name)
        held = None if position is None else argument_variable(position)
        return None if isinstance(held, ops.EagerTensor) and held.dtype != tf.resource else held

    return lambda tensor: variable_of(tensor, argument)

"""NodeDefs that the engine adds to graphs, and how the inputs of a node spell tensors.

In a GraphDef a tensor is "name:1", in a FunctionDef "name:output:1".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, tensor_shape_pb2
from tensorflow.python.framework import op_def_registry, tensor_util

INT64 = tf.int64.as_datatype_enum


def new_node(name: str, op: str, inputs: Iterable[str] = (), N: int = 0, **types: int) -> Any:
    """Return a node.  N: length of a list among its inputs.  types: dtype enums by attribute."""
    node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute, value in types.items():
        node.attr[attribute].type = value
    if N:
        node.attr["N"].i = N
    return node


def constant(name: str, value: Any, control_inputs: Iterable[str] = ()) -> Any:
    """Return a Const node, in the loop frame of its control inputs."""
    # A Const reads nothing, so only control inputs bring it into the frame of a loop.
    node = new_node(name, "Const", control_inputs)
    node.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return node


def opaque_identity(name: str, inputs: Iterable[str], dtype: int, rank: int | None = None) -> Any:
    """Return a node that passes its input on; TensorFlow's optimizer keeps it, unlike an Identity.

    dtype: its enum.  rank: None if unknown.
    """
    node = new_node(name, "EnsureShape", inputs, T=dtype)
    shape = node.attr["shape"].shape
    shape.unknown_rank = rank is None
    shape.dim.extend([tensor_shape_pb2.TensorShapeProto.Dim(size=-1)] * (rank or 0))
    return node


def placeholder(name: str, dtype: int, shape: tf.TensorShape) -> Any:
    """Return a node whose value is fed.  dtype: its enum."""
    node = new_node(name, "Placeholder", dtype=dtype)
    node.attr["shape"].shape.CopyFrom(shape.as_proto())
    return node


def control_trigger(name: str, nodes: Iterable[str]) -> Any:
    """Return a node that runs when each of some nodes of its frame has run or is dead.

    Other nodes that wait for a dead node are dead, too.
    """
    return new_node(name, "ControlTrigger", [f"^{node}" for node in nodes])


class Edge(NamedTuple):
    """A tensor: the name of its node, or of a function's argument, and its index among the outputs."""

    node: str
    index: int  # type: ignore[assignment]


def argument_sizes(args: Sequence[Any], attributes: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Return name and length of each argument of an OpDef; None as the length of a single tensor."""
    sizes: list[tuple[str, int | None]] = []
    for arg in args:
        if arg.number_attr:
            sizes.append((arg.name, attributes[arg.number_attr].i))
        elif arg.type_list_attr:
            sizes.append((arg.name, len(attributes[arg.type_list_attr].list.type)))
        else:
            sizes.append((arg.name, None))
    return sizes


def op_def(type: str) -> Any:
    """Return TensorFlow's OpDef of an op; None for a function that is called by its name."""
    return op_def_registry.get(type)


def input_sizes(node: Any) -> list[tuple[str, int | None]]:
    """Return names and lengths of a node's inputs, from its OpDef; one list for a call of a function."""
    definition = op_def(node.op)
    if definition is None:
        return [("args", sum(not text.startswith("^") for text in node.input))]
    return argument_sizes(definition.input_arg, node.attr)


def references(node: Any, outputs: bool = False) -> list[bool]:
    """Return for each input of a node, or each output, if it is a reference to a variable; [] if unknown."""
    definition = op_def(node.op)
    if definition is None:
        return []
    return [arg.is_ref for arg in (definition.output_arg if outputs else definition.input_arg)]


def output_sizes(node: Any) -> list[tuple[str, int | None]]:
    """Return names and lengths of a node's outputs, from its OpDef."""
    definition = op_def(node.op)
    return [] if definition is None else argument_sizes(definition.output_arg, node.attr)


class GraphSyntax:
    """The spelling of tensors in a GraphDef, where control flow of version 1 may make values dead."""

    dead_values = True

    def parse(self, text: str) -> Edge:
        """Return the tensor that an input names; index 0 of the node for a control input."""
        name, _, index = text.removeprefix("^").partition(":")
        return Edge(name, int(index) if index else 0)

    def write(self, edge: Edge) -> str:
        """Return a tensor as an input spells it."""
        return f"{edge.node}:{edge.index}" if edge.index else edge.node


class FunctionSyntax:
    """The spelling of tensors in a FunctionDef with these arguments and nodes."""

    dead_values = False

    def __init__(self, arguments: Sequence[str], nodes: Mapping[str, Any]) -> None:
        self._arguments = set(arguments)
        self._nodes = nodes
        self._output_ranges_by_node: dict[str, list[tuple[str, int, int]]] = {}

    def parse(self, text: str) -> Edge:
        """Return the tensor that an input names: "arg" or "node:output:index"; index 0 for "^node"."""
        if text.startswith("^"):
            return Edge(text[1:], 0)
        if ":" not in text:
            return Edge(text, 0)
        name, output, index_in_output = text.split(":")
        first_index = next(first for arg, first, _ in self._output_ranges(name) if arg == output)
        return Edge(name, first_index + int(index_in_output))

    def write(self, edge: Edge) -> str:
        """Return a tensor as an input spells it."""
        if edge.node in self._arguments:
            return edge.node
        for arg, first, end in self._output_ranges(edge.node):
            if first <= edge.index < end:
                return f"{edge.node}:{arg}:{edge.index - first}"
        raise IndexError(f"{edge.node} has no output {edge.index}")

    def forget(self, name: str) -> None:
        """Drop the cached layout of a node, whose outputs have changed."""
        self._output_ranges_by_node.pop(name, None)

    def _output_ranges(self, name: str) -> list[tuple[str, int, int]]:
        """Return the outputs of the node `name`: name, first index, and the index after the last."""
        ranges = self._output_ranges_by_node.get(name)
        if ranges is None:
            ranges, first = [], 0
            for arg, size in output_sizes(self._nodes[name]):
                end = first + (1 if size is None else size)
                ranges.append((arg, first, end))
                first = end
            self._output_ranges_by_node[name] = ranges
        return ranges


Syntax = GraphSyntax | FunctionSyntax

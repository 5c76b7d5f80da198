"""Nodes of an ONNX graph, with the bodies of control flow that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

# Protocol buffers are edited, not the graphs of onnx_ir: it drops sparse initializers, without which a model
# does not load, and training information.


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def reads_of(node: NodeProto) -> Iterator[str]:
    """Yield the values of the graph around a node that the node reads, in its bodies too."""
    yield from filter(None, node.input)
    yield from captures_of(node)


def captures_of(node: NodeProto) -> Iterator[str]:
    """Yield the values of the graph around a node that the bodies of the node read."""
    for body in bodies_of(node):
        inside = {value.name for value in (*body.input, *body.initializer)}
        inside |= {value.values.name for value in body.sparse_initializer}
        for inner in body.node:
            yield from (name for name in reads_of(inner) if name not in inside)
            inside.update(inner.output)
        yield from (value.name for value in body.output if value.name not in inside)


def read_in(graph: GraphProto) -> set[str]:
    """Return the names of the outputs of a graph, and of the values that its nodes read."""
    return {value.name for value in graph.output}.union(*map(reads_of, graph.node))


def names_in(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the values and nodes of a graph and of its bodies."""
    yield from (value.name for value in (*graph.input, *graph.initializer, *graph.output))
    yield from (value.values.name for value in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for body in bodies_of(node):
            yield from names_in(body)


def first_output_of(node: NodeProto) -> str:
    """Return the first value that a node makes, by which the node is known: no other node makes the value."""
    return next(filter(None, node.output), "")


def constant_of(node: NodeProto) -> TensorProto | None:
    """Return what a Constant node makes, under its name; None for sparse values, texts and other nodes."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    if not _is_standard(node) or node.op_type != "Constant" or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    tensor = TensorProto()
    if attribute.name == "value":
        tensor.CopyFrom(attribute.t)
    elif attribute.name in _NUMBERS:
        array = np.array(helper.get_attribute_value(attribute), _NUMBERS[attribute.name])
        tensor = numpy_helper.from_array(array)
    else:
        return None
    tensor.name = node.output[0]
    return tensor


_NUMBERS = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}


def remove_unread(graph: GraphProto, kept: Iterable[str] = ()) -> None:
    """Remove initializers that nothing reads, and nodes that only move them; in bodies too.

    Types of values between nodes are removed as well: runtimes infer them, and edits may change them.
    kept: names of initializers that stay, read or not.
    """
    del graph.value_info[:]
    read = {*kept, *(value.name for value in graph.output)}
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if _is_standard(node) and node.op_type in _MOVES and read.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in bodies_of(node):
            remove_unread(body)
        read.update(reads_of(node))
    unread = {value.name for value in graph.initializer} - read
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread:
                del field[i]
    for i in reversed(range(len(graph.sparse_initializer))):
        if graph.sparse_initializer[i].values.name not in read:
            del graph.sparse_initializer[i]


_MOVES = {"Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"}
"""Types of nodes by which weights reach their readers."""


def _is_standard(node: NodeProto) -> bool:
    """Return True for an operator that ONNX defines."""
    return node.domain in ("", "ai.onnx")


def attribute_of(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute; the default where the node has none of this name."""
    from onnx import helper

    attribute = next((attribute for attribute in node.attribute if attribute.name == name), None)
    return default if attribute is None else helper.get_attribute_value(attribute)


def remove_attribute(node: NodeProto, name: str) -> None:
    """Remove an attribute, if there is one of this name."""
    for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(attribute)


def set_attribute(node: NodeProto, name: str, value: int | Sequence[int]) -> None:
    """Give an attribute a value."""
    from onnx import helper

    remove_attribute(node, name)
    node.attribute.append(helper.make_attribute(name, value))

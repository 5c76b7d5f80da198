"""Names of values in nodes, also where bodies of control flow read them from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import GraphProto, NodeProto


def names_read(node: NodeProto) -> Iterator[str]:
    """Yield the values of its graph that a node reads, also in its bodies."""
    yield from (name for name in node.input if name)
    for body in bodies_of(node):
        yield from captured(body)


def captured(graph: GraphProto) -> Iterator[str]:
    """Yield the values of graphs around that a graph reads."""
    inner_names = {entry.name for entry in (*graph.input, *graph.initializer)}
    inner_names |= {entry.values.name for entry in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in names_read(node) if name not in inner_names)
        inner_names.update(node.output)
    yield from (entry.name for entry in graph.output if entry.name not in inner_names)


def rename_values(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    """Return copies of nodes with renamed values."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        _rename(copy, names)
        copies.append(copy)
    return copies


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values of a node, and in its bodies those of graphs around."""
    if not names:
        return
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for body in bodies_of(node):
        inner_names = {value.name for value in (*body.input, *body.initializer)}
        inner_names |= {name for inner in body.node for name in inner.output}
        outer = {name: new for name, new in names.items() if name not in inner_names}
        for inner in body.node:
            _rename(inner, outer)
        for output in body.output:
            output.name = outer.get(output.name, output.name)


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs

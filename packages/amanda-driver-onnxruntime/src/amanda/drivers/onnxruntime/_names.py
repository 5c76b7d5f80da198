"""Names of values in nodes, also where bodies of control flow read them from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import GraphProto, NodeProto


def reads(node: NodeProto) -> Iterator[str]:
    """The values of the graph around it that a node reads, in its bodies too."""
    yield from (name for name in node.input if name)
    for body in bodies_of(node):
        yield from captured(body)


def captured(graph: GraphProto) -> Iterator[str]:
    """The values of graphs around it that a graph reads."""
    own = {one.name for one in (*graph.input, *graph.initializer)}
    own |= {one.values.name for one in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
        own.update(node.output)
    yield from (one.name for one in graph.output if one.name not in own)


def renamed_nodes(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    """Copies of nodes in which values have other names."""
    made = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        _rename(copy, names)
        made.append(copy)
    return made


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    if not names:
        return
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for body in bodies_of(node):
        own = {one.name for one in (*body.input, *body.initializer)}
        own |= {name for inner in body.node for name in inner.output}
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in body.node:
            _rename(inner, outer)
        for output in body.output:
            output.name = outer.get(output.name, output.name)


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs

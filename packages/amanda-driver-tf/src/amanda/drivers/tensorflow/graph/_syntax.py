"""Spelling of a tensor as an input: in a GraphDef ("name:1") and in a FunctionDef ("name:output:1")."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensorflow.python.framework import op_def_registry


class Edge(NamedTuple):
    """A tensor: the node that makes it, or a function's argument, and which of its outputs."""

    node: str
    index: int  # type: ignore[assignment]


def sizes(args: Sequence[Any], attributes: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """For each argument of an OpDef its name, and its length where it is a list of tensors."""
    found: list[tuple[str, int | None]] = []
    for arg in args:
        if arg.number_attr:
            found.append((arg.name, attributes[arg.number_attr].i))
        elif arg.type_list_attr:
            found.append((arg.name, len(attributes[arg.type_list_attr].list.type)))
        else:
            found.append((arg.name, None))
    return found


def op_def(type: str) -> Any:
    """TensorFlow's definition of an op; None for a function that is called by its name."""
    return op_def_registry.get(type)


def input_sizes(node: Any) -> list[tuple[str, int | None]]:
    """Names and lengths of a node's inputs as its op defines them."""
    definition = op_def(node.op)
    if definition is None:
        return [("args", sum(not text.startswith("^") for text in node.input))]
    return sizes(definition.input_arg, node.attr)


def references(node: Any, outputs: bool = False) -> list[bool]:
    """Return which of a node's inputs, or outputs, its op takes or gives by reference."""
    definition = op_def(node.op)
    if definition is None:
        return []
    return [arg.is_ref for arg in (definition.output_arg if outputs else definition.input_arg)]


def output_sizes(node: Any) -> list[tuple[str, int | None]]:
    """Names and lengths of a node's outputs as its op defines them."""
    definition = op_def(node.op)
    return [] if definition is None else sizes(definition.output_arg, node.attr)


class GraphSyntax:
    """Of a GraphDef. Its values may be dead, where control flow of version 1 leaves a branch out."""

    dead_values = True

    def parse(self, text: str) -> Edge:
        """The tensor that an input names; a node by its name where it is a control input."""
        name, _, index = text.removeprefix("^").partition(":")
        return Edge(name, int(index) if index else 0)

    def write(self, edge: Edge) -> str:
        """The tensor as an input."""
        return f"{edge.node}:{edge.index}" if edge.index else edge.node


class FunctionSyntax:
    """Of a FunctionDef with these arguments and nodes."""

    dead_values = False

    def __init__(self, arguments: Sequence[str], nodes: Mapping[str, Any]) -> None:
        self._arguments = set(arguments)
        self._nodes = nodes
        self._offsets: dict[str, list[tuple[str, int, int]]] = {}

    def parse(self, text: str) -> Edge:
        """The tensor that an input names."""
        if text.startswith("^"):
            return Edge(text[1:], 0)
        name, *rest = text.split(":")
        if not rest:
            return Edge(name, 0)
        offset = next(first for arg, first, _ in self._of(name) if arg == rest[0])
        return Edge(name, offset + int(rest[1]))

    def write(self, edge: Edge) -> str:
        """The tensor as an input."""
        if edge.node in self._arguments:
            return edge.node
        for arg, first, end in self._of(edge.node):
            if first <= edge.index < end:
                return f"{edge.node}:{arg}:{edge.index - first}"
        raise IndexError(f"{edge.node} has no output {edge.index}")

    def forget(self, name: str) -> None:
        """Note that a node's outputs have changed."""
        self._offsets.pop(name, None)

    def _of(self, name: str) -> list[tuple[str, int, int]]:
        offsets = self._offsets.get(name)
        if offsets is None:
            offsets, first = [], 0
            for arg, size in output_sizes(self._nodes[name]):
                end = first + (1 if size is None else size)
                offsets.append((arg, first, end))
                first = end
            self._offsets[name] = offsets
        return offsets


Syntax = GraphSyntax | FunctionSyntax

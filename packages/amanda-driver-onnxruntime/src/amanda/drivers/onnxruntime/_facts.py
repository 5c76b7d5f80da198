"""Facts of a node, for tools."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, numpy_helper

from amanda.backend import Namespace, OpFacts, Side

from ._operation import Operation
from ._symbols import Symbol, read_value

_FRAMEWORK = re.compile(r"/(?:site|dist)-packages/torch/")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def facts_of(
    node: NodeProto,
    name: str,
    op_id: int,
    namespace: Namespace,
    names: tuple[str, ...],
    inputs: Side,
    graph: Hashable,
    original: Callable[[], Any] | None,
) -> OpFacts:
    """Facts of a node; names: of its inputs.  graph: the identity of the graph that it is in."""
    told = {entry.key: entry.value for entry in node.metadata_props}
    operation = Operation(node, name, graph)
    read = tuple(one.root for one in inputs.symbols if one is not None and one.root is not None)
    held = [i for i, value in enumerate(inputs.values) if _holder(graph, value) is not None]
    return OpFacts(
        operation, op_id, namespace, names, inputs.values, attributes=Attributes(node),
        scope=scope_of(name, told), source=source_of(told), read_value=read_value, op_type=operation.type,
        graph=graph, read_variables=lambda: read, original=original, parameters=held,
        variable_of=lambda value: _holder(graph, value), aliases=[name.lstrip("/")],
    )  # fmt: skip


def _holder(graph: Hashable, value: Any) -> tuple[Hashable, str] | None:
    """Return a name, for every session, of the initializer that a value is or is made of: graph and name."""
    return (graph, value.root) if isinstance(value, Symbol) and value.root is not None else None


def scope_of(name: str, told: Mapping[str, str]) -> str:
    """The path of the module that a node was exported from, else of the node's name.

    told: the node's metadata: torch.onnx writes `pkg.torch.onnx.name_scopes`, the paths of the modules from
    the outermost one, and the op's own name.
    """
    try:
        scopes = ast.literal_eval(told.get("pkg.torch.onnx.name_scopes", "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    if isinstance(scopes, list) and len(scopes) > 1:
        return str(scopes[-2])
    return name.partition(";")[0].rpartition("/")[0].lstrip("/")  # tf2onnx joins the names of what it folds


def source_of(told: Mapping[str, str]) -> str:
    """ "file:line" of the innermost user's line that an exporter tells; "" where it tells none."""
    frames = _FRAME.findall(told.get("pkg.torch.onnx.stack_trace", ""))
    own = [frame for frame in frames if not _FRAMEWORK.search(frame[0])]
    return ":".join((own or frames)[-1]) if frames else ""


class Attributes(Mapping[str, Any]):
    """A node's attributes in Python's terms, made when they are asked for; graphs among them are left out."""

    def __init__(self, node: NodeProto) -> None:
        self._attributes = {one.name: one for one in node.attribute if one.type not in _GRAPHS}

    def __getitem__(self, name: str) -> Any:
        return python_value(self._attributes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)


_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def python_value(attribute: AttributeProto) -> Any:
    """A number, text, an array, or a list of those."""
    value: Any = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    if isinstance(value, (str, int, float)) or not hasattr(value, "__iter__"):
        return value
    return [one.decode(errors="replace") if isinstance(one, bytes) else one for one in value]

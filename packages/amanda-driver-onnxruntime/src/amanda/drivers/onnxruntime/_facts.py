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
    """Return the facts of a node.  names: of its inputs.  graph: the identity of its graph."""
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    operation = Operation(node, name, graph)
    roots = tuple(symbol.root for symbol in inputs.symbols if symbol is not None and symbol.root is not None)
    parameter_positions = [
        i for i, value in enumerate(inputs.values) if _initializer_key(graph, value) is not None
    ]
    return OpFacts(
        operation, op_id, namespace, names, inputs.values, attributes=OnnxAttributes(node),
        scope=scope_of(name, metadata), source=source_of(metadata), read_value=read_value,
        op_type=operation.type, graph=graph, read_variables=lambda: roots, original=original,
        parameters=parameter_positions, variable_of=lambda value: _initializer_key(graph, value),
        aliases=[name.lstrip("/")],
    )  # fmt: skip


def _initializer_key(graph: Hashable, value: Any) -> tuple[Hashable, str] | None:
    """Return a key of the initializer that a value is computed from alone: graph and name; else None."""
    return (graph, value.root) if isinstance(value, Symbol) and value.root is not None else None


def scope_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the path of the module that a node was exported from, or the path in the node's name.

    metadata: torch.onnx writes `pkg.torch.onnx.name_scopes`, the paths of the modules from the outermost in,
    and then the op's name.
    """
    try:
        scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    if isinstance(scopes, list) and len(scopes) > 1:
        return str(scopes[-2])
    return name.partition(";")[0].rpartition("/")[0].lstrip("/")  # tf2onnx joins the names of what it folds


def source_of(metadata: Mapping[str, str]) -> str:
    """Return "file:line" of the innermost user's line in an exporter's metadata; "" if there is none."""
    frames = _FRAME.findall(metadata.get("pkg.torch.onnx.stack_trace", ""))
    user_frames = [frame for frame in frames if not _FRAMEWORK.search(frame[0])]
    return ":".join((user_frames or frames)[-1]) if frames else ""


class OnnxAttributes(Mapping[str, Any]):
    """The attributes of a node as Python values, converted when they are read; without graphs."""

    def __init__(self, node: NodeProto) -> None:
        self._attributes = {
            attribute.name: attribute for attribute in node.attribute if attribute.type not in _GRAPHS
        }

    def __getitem__(self, name: str) -> Any:
        return python_value(self._attributes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)


_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def python_value(attribute: AttributeProto) -> Any:
    """Return an attribute as a number, text, an array, or a list of these."""
    value: Any = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    if isinstance(value, (str, int, float)) or not hasattr(value, "__iter__"):
        return value
    return [element.decode(errors="replace") if isinstance(element, bytes) else element for element in value]

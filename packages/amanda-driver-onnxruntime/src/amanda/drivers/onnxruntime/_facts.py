"""Facts of a node for tools: operation, names of arguments, attributes, module and source line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, numpy_helper
from onnx.defs import OpSchema, SchemaError

from amanda import backend
from amanda.backend import Namespace, OpFacts, Side

from ._values import OnnxSymbol, read_value

OWN_DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Domains whose op types have no prefix."""


class OnnxOperation(backend.Operation):
    """A node; equal to each other object for the same node.

    type: ONNX' name for the computation ("Conv"), or "domain::type" for a custom op.
    name: the node's name, or a generated one.  domain: "" for ONNX' own ops.  __name__: the type.
    node: the NodeProto, without the values of large constants.
    """

    __slots__ = ("domain", "name", "node", "type")

    def __init__(self, node: onnx.NodeProto, name: str, key: Hashable = None) -> None:
        self.domain = node.domain
        is_plain_name = node.domain in OWN_DOMAINS
        self.type = node.op_type if is_plain_name else f"{node.domain}::{node.op_type}"
        self.name = name
        self.node = node
        super().__init__(self.type, name, key)

    def get_attr(self, name: str) -> Any:
        """Return an attribute of the node.

        Raises ValueError if the node has none of that name.
        """
        for attribute in self.node.attribute:
            if attribute.name == name:
                return onnx.helper.get_attribute_value(attribute)
        raise ValueError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"


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
    """Return the facts of a node.  names: of its inputs.  graph: the identity of its graph.

    original: creates a function that computes the node; None for a node with bodies.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    operation = OnnxOperation(node, name, graph)
    roots = (symbol.root for symbol in inputs.symbols if symbol is not None)
    initializers_read = tuple(name for name in roots if name is not None)
    parameter_positions = [
        i for i, value in enumerate(inputs.values) if _initializer_key(graph, value) is not None
    ]
    return OpFacts(
        operation, op_id, namespace, names, inputs.values, attributes=OnnxAttributes(node),
        scope=scope_of(name, metadata), source=source_of(metadata), read_value=read_value,
        op_type=operation.type, graph=graph, read_variables=lambda: initializers_read, original=original,
        variable_positions=parameter_positions, variable_of=lambda value: _initializer_key(graph, value),
        scope_aliases=[name.lstrip("/")],
    )  # fmt: skip


def _initializer_key(graph: Hashable, value: Any) -> tuple[Hashable, str] | None:
    """Return a key of the initializer that a value is computed from alone: graph and name; else None."""
    if not isinstance(value, OnnxSymbol) or value.root is None:
        return None
    return graph, value.root


def scope_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the path of the module that a node was exported from, or the path in the node's name.

    metadata: torch.onnx writes `pkg.torch.onnx.name_scopes`, the paths of the modules from the outermost in,
    and then the op's name.
    """
    try:
        # Metadata is text of any origin, so it is parsed, and never evaluated.
        scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    if isinstance(scopes, list) and len(scopes) > 1:
        return str(scopes[-2])
    return name.partition(";")[0].rpartition("/")[0].lstrip("/")  # tf2onnx joins the names of what it folds


def source_of(metadata: Mapping[str, str]) -> str:
    """Return "file:line" of the innermost user's line in an exporter's metadata; "" if there is none.

    Among lines of PyTorch alone, the innermost of these.
    """
    frames = _FRAME.findall(metadata.get("pkg.torch.onnx.stack_trace", ""))
    # torch.onnx writes the whole stack, with PyTorch's own frames innermost.
    user_frames = [(file, line) for file, line in frames if not _FRAMEWORK.search(file)]
    if not frames:
        return ""
    file, line = (user_frames or frames)[-1]
    return f"{file}:{line}"


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


Opsets = Mapping[str, int]


class Layout(NamedTuple):
    """Names of the values of a side, and for each its length where it is a list, else None."""

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]


def input_layout(node: onnx.NodeProto, opsets: Opsets) -> Layout:
    """Return names and lengths of a node's inputs; a variadic input is a list."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.inputs if schema else (), len(node.input))


def output_layout(node: onnx.NodeProto, opsets: Opsets) -> Layout:
    """Return names and lengths of a node's outputs; a variadic output is a list."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.outputs if schema else (), len(node.output))


# A graph has many nodes and few op types.
@cache
def schema_of(op_type: str, domain: str, version: int) -> OpSchema | None:
    """Return the schema of an op type; None if ONNX has none, as for custom ops."""
    try:
        schema: OpSchema = onnx.defs.get_schema(op_type, version, domain)
    except SchemaError:
        return None
    return schema


def _layout(parameters: Sequence[Any], count: int) -> Layout:
    """Return names and lengths of inputs or outputs, with numbers as names of those without a parameter.

    A variadic parameter takes all that remain.
    """
    names: list[str] = []
    sizes: list[int | None] = []
    for parameter in parameters:
        # Optional values at the end may be left out, and the last parameter may stand for any number.
        remaining_count = count - len(sizes)
        if parameter.option == OpSchema.FormalParameterOption.Variadic:
            return Layout((*names, parameter.name), (*sizes, remaining_count))
        if remaining_count <= 0:
            break
        names.append(parameter.name)
        sizes.append(None)
    numbers = [str(i) for i in range(len(names), count)]
    return Layout((*names, *numbers), (*sizes, *(None for _ in numbers)))

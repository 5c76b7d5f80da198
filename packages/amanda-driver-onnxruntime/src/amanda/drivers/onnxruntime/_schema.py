"""Names and groups of a node's arguments, by ONNX' schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnx
from onnx.defs import OpSchema, SchemaError

Opsets = Mapping[str, int]
Layout = tuple[tuple[str, ...], tuple[int | None, ...]]
"""Names of the values of a side, and for each its length where it is a list, else None."""


def input_layout(node: onnx.NodeProto, opsets: Opsets) -> Layout:
    """Names and sizes of a node's inputs; a variadic one is a list."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.inputs if schema else (), len(node.input))


def output_layout(node: onnx.NodeProto, opsets: Opsets) -> Layout:
    """The same of its outputs."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.outputs if schema else (), len(node.output))


@cache
def schema_of(op_type: str, domain: str, version: int) -> OpSchema | None:
    """The schema of a type; None where ONNX has none, as of custom ops."""
    try:
        schema: OpSchema = onnx.defs.get_schema(op_type, version, domain)
    except SchemaError:
        return None
    return schema


def _layout(parameters: Sequence[Any], count: int) -> Layout:
    names: list[str] = []
    sizes: list[int | None] = []
    for parameter in parameters:
        left = count - len(sizes)
        if parameter.option == OpSchema.FormalParameterOption.Variadic:
            return (*names, parameter.name), (*sizes, left)
        if left <= 0:
            break
        names.append(parameter.name)
        sizes.append(None)
    extra = count - len(sizes)
    return (*names, *(f"{len(names) + i}" for i in range(extra))), (*sizes, *(None for _ in range(extra)))

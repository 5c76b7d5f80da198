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
    """Return names and lengths of a node's inputs; a variadic input is a list."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.inputs if schema else (), len(node.input))


def output_layout(node: onnx.NodeProto, opsets: Opsets) -> Layout:
    """Return names and lengths of a node's outputs; a variadic output is a list."""
    schema = schema_of(node.op_type, node.domain, opsets.get(node.domain, 0))
    return _layout(schema.outputs if schema else (), len(node.output))


@cache
def schema_of(op_type: str, domain: str, version: int) -> OpSchema | None:
    """Return the schema of an op type; None if ONNX has none, as for custom ops."""
    try:
        schema: OpSchema = onnx.defs.get_schema(op_type, version, domain)
    except SchemaError:
        return None
    return schema


def _layout(parameters: Sequence[Any], count: int) -> Layout:
    """Return names and lengths of `count` values, with numbers as names of those without a parameter."""
    names: list[str] = []
    sizes: list[int | None] = []
    for parameter in parameters:
        remaining = count - len(sizes)
        if parameter.option == OpSchema.FormalParameterOption.Variadic:
            return (*names, parameter.name), (*sizes, remaining)
        if remaining <= 0:
            break
        names.append(parameter.name)
        sizes.append(None)
    extra = count - len(sizes)
    return (*names, *(f"{len(names) + i}" for i in range(extra))), (*sizes, *(None for _ in range(extra)))

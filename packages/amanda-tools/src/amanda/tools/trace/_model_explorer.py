"""The JSON that Model Explorer opens (github.com/google-ai-edge/model-explorer, `GraphCollection`)."""

from __future__ import annotations

import json
from typing import Any

from amanda.tools.trace._graph import Graph, Op, Tensor


def collection(graph: Graph, label: str = "amanda") -> dict[str, Any]:
    """A collection of one graph, whose boxes are modules; backward ops are in a box of their own."""
    homes = {index: op for op in reversed(graph.ops) for index in op.reads}
    outside = [
        _outside(tensor, homes[tensor.index])
        for tensor in graph.tensors
        if tensor.producer is None and tensor.index in homes
    ]
    return {
        "label": label,
        "graphs": [{"id": label, "nodes": [*outside, *(_node(graph, op) for op in graph.ops)]}],
    }


def _outside(tensor: Tensor, reader: Op) -> dict[str, Any]:
    """A tensor that no op made, beside the op that reads it first."""
    return {
        "id": f"tensor{tensor.index}",
        "label": tensor.name or tensor.kind,
        "namespace": _namespace(reader) if tensor.kind in ("parameter", "buffer", "constant") else "",
        "attrs": [_attribute("kind", tensor.kind)],
        "outputsMetadata": [_metadata(0, tensor)],
    }


def _node(graph: Graph, op: Op) -> dict[str, Any]:
    attributes = {
        "name": op.name, "phase": op.phase, "source": op.source, "id": f"{op.id:016x}",
        **({} if op.calls is None else {"calls": op.calls}), **(op.attributes or {}),
    }  # fmt: skip
    return {
        "id": f"op{op.index}",
        "label": op.type,
        "namespace": _namespace(op),
        "attrs": [_attribute(name, value) for name, value in attributes.items()],
        "incomingEdges": [
            _edge(graph, tensor, i)
            for i, tensor in enumerate(graph.inputs(op))
            if tensor.producer != op.index
        ],
        "outputsMetadata": [_metadata(i, tensor) for i, tensor in enumerate(graph.outputs(op))],
    }


def _edge(graph: Graph, tensor: Tensor, position: int) -> dict[str, str]:
    source, output = f"tensor{tensor.index}", 0
    if tensor.producer is not None:
        source = f"op{tensor.producer}"
        output = graph.ops[tensor.producer].makes.index(tensor.index)
    return {
        "sourceNodeId": source, "sourceNodeOutputId": str(output), "targetNodeInputId": str(position)
    }  # fmt: skip


def _namespace(op: Op) -> str:
    path = op.module if "/" in op.module else op.module.replace(".", "/")
    return path if op.phase == "forward" else f"{op.phase}/{path}".rstrip("/")


def _metadata(position: int, tensor: Tensor) -> dict[str, Any]:
    attributes = [_attribute("tensor_shape", str(tensor)), _attribute("tensor", tensor.index)]
    return {"id": str(position), "attrs": attributes}


def _attribute(key: str, value: Any) -> dict[str, str]:
    return {"key": key, "value": value if isinstance(value, str) else json.dumps(value)}

"""The JSON that Model Explorer opens (github.com/google-ai-edge/model-explorer, `GraphCollection`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from amanda.tools.trace._graph import Graph, Op, Tensor


def collection(graph: Graph, label: str = "amanda") -> dict[str, Any]:
    """Return a collection of one graph, whose boxes are modules; backward ops are in a box of their own."""
    readers = {index: op for op in reversed(graph.ops) for index in op.reads}
    outside = (tensor for tensor in graph.tensors if tensor.producer is None and tensor.index in readers)
    nodes = [_outside(tensor, readers[tensor.index]) for tensor in outside]
    nodes += [_node(graph, op) for op in graph.ops]
    return {"label": label, "graphs": [{"id": label, "nodes": nodes}]}


def _outside(tensor: Tensor, reader: Op) -> dict[str, Any]:
    """Return the node of a tensor that no op made, beside the op that reads it first."""
    return {
        "id": f"tensor{tensor.index}",
        "label": tensor.name or tensor.kind,
        "namespace": _namespace(reader) if tensor.kind in ("parameter", "buffer", "constant") else "",
        "attrs": _attributes({"kind": tensor.kind}),
        "outputsMetadata": _outputs([tensor]),
    }


def _node(graph: Graph, op: Op) -> dict[str, Any]:
    attributes = {
        "name": op.name, "phase": op.phase, "source": op.source, "id": f"{op.id:016x}",
        **({} if op.calls is None else {"calls": op.calls}), **(op.attributes or {}),
    }  # fmt: skip
    edges = enumerate(graph.inputs(op))
    return {
        "id": f"op{op.index}",
        "label": op.type,
        "namespace": _namespace(op),
        "attrs": _attributes(attributes),
        "incomingEdges": [_edge(graph, one, i) for i, one in edges if one.producer != op.index],
        "outputsMetadata": _outputs(graph.outputs(op)),
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


def _outputs(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    told = ({"tensor_shape": str(tensor), "tensor": tensor.index} for tensor in tensors)
    return [{"id": str(position), "attrs": _attributes(one)} for position, one in enumerate(told)]


def _attributes(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"key": key, "value": one if isinstance(one, str) else json.dumps(one)} for key, one in values.items()
    ]

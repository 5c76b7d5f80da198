"""Small ONNX models, and tools for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

import amanda
from amanda.drivers.onnxruntime import session_options

Array = NDArray[Any]


def node(type: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    """A node, from names with spaces between them."""
    return helper.make_node(type, inputs.split(" "), outputs.split(" "), name or f"/{type}", **attributes)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: dict[str, Sequence[Any]],
    outputs: Sequence[str],
    weights: dict[str, Array] | None = None,
    opset: int = 18,
    types: dict[str, int] | None = None,
) -> ModelProto:
    """A checked model of nodes; inputs: shapes by name, of float32 unless `types` says otherwise."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, (types or {}).get(name, 1), shape)
            for name, shape in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


FIRST, SECOND = random(16, 16, seed=1), random(16, 16, seed=2)


def two_layers() -> ModelProto:
    """second(relu(first(x))) for x of (N, 16)."""
    nodes = [
        node("MatMul", "x first", "h", "/first/MatMul"),
        node("Relu", "h", "r", "/act/Relu"),
        node("MatMul", "r second", "y", "/second/MatMul"),
    ]
    return model_of(nodes, {"x": ["N", 16]}, ["y"], {"first": FIRST, "second": SECOND})


def session_of(model: ModelProto, plain: bool = True) -> Any:
    """A session of a model; plain: without fusion."""
    options = session_options() if plain else None
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run(model: ModelProto, **feed: Array) -> list[Array]:
    """What a session of the model gives."""
    return list(session_of(model).run(None, feed))


def tool(analyse: Callable[[amanda.OpContext], Any], *types: str) -> amanda.Tool:
    """A tool that analyses ops of some types; of all, where none is named."""

    def of_types(context: amanda.OpContext) -> None:
        if not types or context.get_op().type in types:
            analyse(context)

    created_tool = amanda.Tool()
    created_tool.add_inst_for_op(of_types)
    return created_tool

"""Costs of nodes whose shapes the file does not say: those of the execution, or none and a note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import NodeProto, helper, numpy_helper

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.flops import FlopsResult, FlopsTool

X = np.linspace(-1, 1, 4 * 12 * 12, dtype=np.float32).reshape(1, 4, 12, 12)
KERNEL, FACTOR = np.ones((4, 4, 3, 3), np.float32), np.ones((12, 8), np.float32)
NODES = {
    "Conv": (helper.make_node("Conv", ["x", "kernel"], ["y"], pads=[1, 1, 1, 1]), 12 * 12 * 4 * 4 * 9),
    "ConvTranspose": (helper.make_node("ConvTranspose", ["x", "kernel"], ["y"]), 12 * 12 * 4 * 4 * 9),
    "MatMul": (helper.make_node("MatMul", ["x", "factor"], ["y"]), 4 * 12 * 12 * 8),
}  # fmt: skip
SHAPES: dict[str, Sequence[Any] | None] = {
    "all told": [1, 4, 12, 12],
    "some told": ["n", 4, None, None],
    "below 0": [-1, 4, -1, -1],
    "no rank": None,
}


def counted(
    nodes: Sequence[NodeProto], inputs: dict[str, Any], reported: bool = False, **feed: Any
) -> FlopsTool:
    """The tool after a run of a model of nodes; inputs: their types by name."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [onnx.ValueInfoProto(name=name, type=type) for name, type in inputs.items()],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(KERNEL, "kernel"), numpy_helper.from_array(FACTOR, "factor")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    tool = FlopsTool()
    with amanda.apply(tool) as scope:
        session.run(None, feed)
    assert bool(scope.report) == reported
    return tool


def floats(shape: Sequence[Any] | None) -> Any:
    return helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("type", NODES)
def test_a_node_costs_the_same_whatever_the_file_says_of_shapes(type: str, shape: str) -> None:
    node, macs = NODES[type]
    result = counted([node], {"x": floats(SHAPES[shape])}, x=X).result
    assert result.total("macs") == macs
    assert not result.unsupported


def test_a_convolution_with_a_weight_that_is_given_without_a_rank_is_counted() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    result = counted([node], {"x": floats(None), "w": floats(None)}, x=X, w=KERNEL).result
    assert result.total("macs") == NODES["Conv"][1]


def test_executions_with_other_shapes_are_counted_apart() -> None:
    node = NODES["MatMul"][0]
    graph = helper.make_graph(
        [node], "graph", [onnx.ValueInfoProto(name="x", type=floats(None))],
        [onnx.ValueInfoProto(name="y")], [numpy_helper.from_array(FACTOR, "factor")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    tool = FlopsTool()
    with amanda.apply(tool):
        session.run(None, {"x": X})
        session.run(None, {"x": X[0, 0]})
    assert [place.macs for place in tool.result.places] == [4 * 12 * 12 * 8, 12 * 12 * 8]


def test_ops_in_a_body_are_told_as_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    def branch(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["x", "factor"], [f"{name}/h"]),
            helper.make_node("Relu", [f"{name}/h"], [name]),
        ]
        return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=name)])

    choice = helper.make_node("If", ["go"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    inputs = {"x": floats(None), "go": helper.make_tensor_type_proto(onnx.TensorProto.BOOL, [])}
    result = counted([choice], inputs, reported=True, x=X, go=np.array(True)).result
    assert result.unseen == {"matmul": 2, "relu": 2}
    said = "Executions of 4 ops cannot be seen, and count as 0: matmul (2), relu (2)."
    assert said in str(result)
    assert said in str(FlopsResult.from_dict(result.to_dict()))
    caplog.clear()
    assert result.total("macs") == 0
    assert said in caplog.text
    assert result.total("calls") == 1


def test_a_total_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [helper.make_node("Det", ["x"], ["d"]), helper.make_node("Relu", ["d"], ["y"])]
    result = counted(nodes, {"x": floats(None)}, x=X).result
    assert result.total("flops") == result.total("flops") == 4
    assert result.unsupported == {"Det": 1}
    told = [one.getMessage() for one in caplog.records if one.name == "amanda"]
    assert told == ["FLOPs: No formula, or no shapes, for 50.0 % of the calls, which count as 0: Det (1)."]

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
    assert [place.macs for place in tool.result.ops] == [4 * 12 * 12 * 8, 12 * 12 * 8]


def test_the_branch_that_runs_is_counted() -> None:
    def branch(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["x", "factor"], [f"{name}/h"]),
            helper.make_node("Relu", [f"{name}/h"], [name]),
        ]
        return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=name)])

    choice = helper.make_node("If", ["go"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    inputs = {"x": floats(None), "go": helper.make_tensor_type_proto(onnx.TensorProto.BOOL, [])}
    result = counted([choice], inputs, x=X, go=np.array(True)).result
    assert result.unseen == {}
    assert result.total("macs") == NODES["MatMul"][1]
    assert result.total("calls") == 3


def test_ops_in_a_body_that_python_cannot_run_are_told_as_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    values = {name: helper.make_tensor_value_info(name, 1, [2]) for name in ("s", "e", "t", "r")}
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Relu", ["t"], ["r"])]
    body = helper.make_graph(nodes, "body", [values["s"], values["e"]], [values["t"], values["r"]])
    scan = helper.make_node("Scan", ["", "start", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    given = [
        helper.make_tensor_value_info("start", 1, [1, 2]),
        helper.make_tensor_value_info("x", 1, [1, 3, 2]),
    ]
    graph = helper.make_graph(
        [scan], "graph", given, [onnx.ValueInfoProto(name=name) for name in ("last", "y")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    tool = FlopsTool()
    with amanda.apply(tool) as scope:
        session.run(None, {"start": np.zeros((1, 2), np.float32), "x": np.ones((1, 3, 2), np.float32)})
    assert all("body of control flow" in reason for _, reason, _ in scope.report)
    result = tool.result
    assert result.unseen == {"add": 1, "relu": 1}
    said = "Executions of 2 ops cannot be seen, and count as 0: add (1), relu (1)."
    assert said in str(result)
    assert said in str(FlopsResult.from_dict(result.to_dict()))
    caplog.clear()
    assert result.total("flops") == 0
    assert said in caplog.text


QKV = {
    "q": [2, 4, 3, 8],
    "k": [2, 4, 5, 8],
    "v": [2, 4, 5, 6],
    "past_k": [2, 4, 7, 8],
    "past_v": [2, 4, 7, 6],
}
ATTENTION: dict[str, tuple[dict[str, list[int]], dict[str, int], int]] = {
    "heads apart": ({name: QKV[name] for name in "qkv"}, {}, 2 * 4 * 3 * 5 * (8 + 6)),
    "heads together": (
        {"q": [2, 3, 32], "k": [2, 5, 16], "v": [2, 5, 12]}, {"q_num_heads": 4, "kv_num_heads": 2},
        2 * 4 * 3 * 5 * (8 + 6),
    ),
    "with a cache": (QKV, {}, 2 * 4 * 3 * 12 * (8 + 6)),
}  # fmt: skip


@pytest.mark.parametrize("form", ATTENTION)
def test_attention_of_onnx_costs_its_two_products(form: str) -> None:
    shapes, attributes, macs = ATTENTION[form]
    names = list(shapes)
    inputs = names if len(names) == 3 else [*names[:3], "", *names[3:]]
    outputs = ["y"] if len(names) == 3 else ["y", "present_k", "present_v"]
    graph = helper.make_graph(
        [helper.make_node("Attention", inputs, outputs, **attributes)], "graph",
        [onnx.ValueInfoProto(name=name, type=floats(shape)) for name, shape in shapes.items()],
        [onnx.ValueInfoProto(name="y")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    tool = FlopsTool()
    with amanda.apply(tool):
        session.run(None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert tool.result.total("macs") == macs
    assert not tool.result.unsupported


def test_a_total_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [helper.make_node("Det", ["x"], ["d"]), helper.make_node("Relu", ["d"], ["y"])]
    result = counted(nodes, {"x": floats(None)}, x=X).result
    assert result.total("flops") == result.total("flops") == 4
    assert result.unsupported == {"Det": 1}
    told = [one.getMessage() for one in caplog.records if one.name == "amanda"]
    assert told == ["FLOPs: No formula, or no shapes, for 50.0 % of the calls, which count as 0: Det (1)."]

"""StandardMapping on ONNX Runtime: words, weights and layouts of nodes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from repository import repository_path

import amanda
from amanda.tools.mapping import StandardMapping, _onnxruntime

KEYS = ("type", "weight_index", "layout", "weight_layout")


class Standard(amanda.Tool):
    """What the mapping says of each op, by the node's name."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, ...]] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        assert (context["phase"], context["backward_type"], context["in_place"]) == ("forward", None, False)
        name = context.get_op().name
        self.seen[name] = (*(context[key] for key in KEYS), context["dtype"](context.get_inputs()[0]))


def seen(nodes: list[Any], weights: dict[str, Any], **inputs: Any) -> dict[str, tuple[Any, ...]]:
    """What the mapping says of the nodes of a model."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, 1, value.shape) for name, value in inputs.items()],
        [onnx.ValueInfoProto(name=nodes[-1].output[0])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    tool = Standard()
    with amanda.apply(tool):
        session.run(None, inputs)
    return tool.seen


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def test_weights_and_layouts_of_an_image_network() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["a"], "conv"),
        helper.make_node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], "norm"),
        helper.make_node("ConvTranspose", ["b", "t"], ["c"], "up"),
        helper.make_node("MaxPool", ["c"], ["d"], "pool", kernel_shape=[2, 2]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "mean"),
        helper.make_node("Flatten", ["e"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w", "u"], ["g"], "head", transB=1),
    ]
    weights = {"k": zeros(4, 3, 3, 3), "s": zeros(4), "t": zeros(4, 2, 3, 3), "w": zeros(5, 2), "u": zeros(5)}
    facts = seen(nodes, weights, x=zeros(1, 3, 8, 8))
    assert facts["conv"] == ("conv2d", 1, "NCHW", "OIHW", "float32")
    assert facts["norm"] == ("batch_norm", 1, "NCHW", None, "float32")
    assert facts["up"] == ("conv_transpose2d", 1, "NCHW", "IOHW", "float32")
    assert facts["pool"] == ("max_pool2d", None, "NCHW", None, "float32")
    assert facts["mean"] == ("adaptive_avg_pool2d", None, "NCHW", None, "float32")
    assert facts["flat"] == ("reshape", None, None, None, "float32")
    assert facts["head"] == ("linear", 1, None, "OI", "float32")


def test_weights_of_products_are_what_initializers_hold() -> None:
    nodes = [
        helper.make_node("Gather", ["e", "i"], ["h"], "look up"),
        helper.make_node("Transpose", ["w"], ["t"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["h", "t"], ["a"], "by weight"),
        helper.make_node("MatMul", ["x", "x"], ["b"], "of values"),
        helper.make_node("MatMul", ["w", "x"], ["c"], "weight first"),
        helper.make_node("Sum", ["a", "b", "c"], ["d"], "sum"),
    ]
    weights = {"e": zeros(9, 4), "i": np.array([1, 2, 3, 4]), "w": zeros(4, 4)}
    facts = seen(nodes, weights, x=zeros(4, 4))
    assert facts["look up"][:2] == ("embedding", 0)
    assert facts["turn"][:2] == ("permute", None)
    assert facts["by weight"][:4] == ("matmul", 1, None, "IO")
    assert facts["of values"][:2] == ("matmul", None)
    assert facts["weight first"][:4] == ("matmul", 0, None, "OI")
    assert facts["sum"][0] == "add_n"


def test_a_weight_is_followed_through_its_quantised_form() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], "wide"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    weights = {"q": np.ones((4, 4), np.int8), "s": np.float32(0.5)}
    assert seen(nodes, weights, x=zeros(2, 4))["product"][:4] == ("matmul", 1, None, "IO")


def test_a_recurrent_op_multiplies_by_several_weights_and_has_none_of_its_own() -> None:
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], "lstm", hidden_size=2)]
    assert seen(nodes, {"w": zeros(1, 8, 3), "r": zeros(1, 8, 2)}, x=zeros(5, 1, 3))["lstm"][:2] == (
        "lstm",
        None,
    )


def test_conv1d_is_told_from_conv3d() -> None:
    nodes = [helper.make_node("Conv", ["x", "k"], ["y"], "conv")]
    assert seen(nodes, {"k": zeros(2, 3, 3)}, x=zeros(1, 3, 8))["conv"][:4] == ("conv1d", 1, "NCW", "OIW")
    assert seen(nodes, {"k": zeros(2, 3, 1, 1, 1)}, x=zeros(1, 3, 2, 2, 2))["conv"][0] == "conv3d"


def test_the_documented_words_are_these() -> None:
    section = repository_path("docs/vocabulary.md").read_text().split("## ONNX Runtime")[1].split("## ")[0]
    rows = [re.findall(r"`(.+?)`", row) for row in section.splitlines() if row.startswith("| `")]
    assert {name: word for word, *names in rows for name in names} == _onnxruntime.WORDS


@pytest.mark.parametrize("name", sorted({*_onnxruntime.WORDS, *_onnxruntime.SPATIAL_WORDS}))
def test_every_type_of_the_table_is_one_of_onnx_or_of_onnxruntime(name: str) -> None:
    ours = {schema.name for schema in onnx.defs.get_all_schemas()}
    contributed = {
        "BiasGelu", "FastGelu", "FusedConv", "FusedMatMul", "GroupNorm", "MultiHeadAttention", "QuickGelu",
        "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    }  # fmt: skip
    assert name in ours | contributed

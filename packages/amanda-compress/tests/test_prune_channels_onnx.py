"""Pruning of channels in ONNX models: what is removed is what was masked, and files become smaller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from pipelined import let_torchvision_load
from torch import nn

import amanda
from amanda.errors import FileError
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import ChannelPruneResult, ChannelPruneTool, PruneError

Array = NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def node(type: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    given = ["" if one == "-" else one for one in inputs.split()]
    return helper.make_node(type, given, outputs.split(), f"/{outputs.split()[0]}/{type}", **attributes)


def model_of(
    nodes: Sequence[NodeProto], shape: Sequence[Any], weights: dict[str, Any], opset: int = 18
) -> ModelProto:
    """Return a model of an input `x` of this shape, and an output `y`; lists of weights are integers."""
    held = [
        numpy_helper.from_array(np.array(one, np.int64) if isinstance(one, list) else one, name)
        for name, one in weights.items()
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [onnx.ValueInfoProto(name="y")]
    graph = helper.make_graph(nodes, "graph", *ends, held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made)


def run(model: ModelProto, x: Array) -> Array:
    found: Array = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {_input(model): x})[0]
    return found


def macs(model: ModelProto, x: Array) -> Any:
    flops = FlopsTool()
    with amanda.apply(flops):
        run(model, x)
    return flops.result.total("macs")


def _input(model: ModelProto) -> str:
    found: str = model.graph.input[0].name
    return found


def removed(model: ModelProto, x: Array, **options: Any) -> ChannelPruneResult:
    """Remove channels; check that the new model computes what the given one did with masks, not before."""
    before, tool = model.SerializeToString(), ChannelPruneTool(**options)
    tool.prepare(model, x)
    dense = run(model, x)
    with amanda.apply(tool) as scope:
        masked = run(model, x)
    assert str(scope.report) == "everything that ran was instrumented"
    result = tool.finalize(model, remove=True)
    assert model.SerializeToString() == before
    onnx.checker.check_model(result.model, full_check=True)
    smaller = run(result.model, x)
    scale = np.abs(masked).max()
    assert np.abs(smaller - masked).max() <= 1e-6 * scale
    assert np.abs(smaller - dense).max() > 1e-3 * scale
    counted = sum(np.prod(one) for name, one in shapes(result.model, floats=True).items())
    assert counted == result.kept_parameters < result.parameters
    read = {name for one in result.model.graph.node for name in one.input}
    assert {one.name for one in result.model.graph.initializer} <= read
    return result


def shapes(model: ModelProto, floats: bool = False) -> dict[str, tuple[int, ...]]:
    return {
        one.name: tuple(one.dims) for one in model.graph.initializer
        if not floats or one.data_type == TensorProto.FLOAT
    }  # fmt: skip


def node_of(model: ModelProto, type: str) -> NodeProto:
    found: NodeProto = next(one for one in model.graph.node if one.op_type == type)
    return found


def images() -> ModelProto:
    """A network for images: a residual addition, depthwise and grouped convolutions, concatenation."""
    norm = {f"n{i}": random(16, seed=i) for i in range(3)} | {"n3": np.abs(random(16, seed=3)) + 0.5}
    weights = {
        "stem": random(16, 3, 3, 3), "deep": random(16, 1, 3, 3), "pairs": random(16, 8, 1, 1),
        "pairs_b": random(16), "side": random(8, 16, 1, 1), "head": random(5, 24), "head_b": random(5),
        **norm,
    }  # fmt: skip
    nodes = [
        node("Conv", "x stem", "a", pads=[1] * 4), node("BatchNormalization", "a n0 n1 n2 n3", "b"),
        node("Relu", "b", "c"), node("Conv", "c deep", "d", group=16, pads=[1] * 4),
        node("Conv", "d pairs pairs_b", "e", group=2), node("Add", "c e", "f"), node("Conv", "f side", "g"),
        node("Concat", "f g", "h", axis=1), node("MaxPool", "h", "i", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "i", "j"), node("Flatten", "j", "k"),
        node("Gemm", "k head head_b", "y", transB=1),
    ]  # fmt: skip
    return model_of(nodes, [1, 3, 8, 8], weights)


X = random(1, 3, 8, 8)


def test_layers_become_smaller_with_those_that_depend_on_them() -> None:
    result = removed(images(), X)
    rows = [(row["module"], row["weights"], row["channels"], row["kept"]) for row in result.to_dict()["rows"]]
    assert rows == [("a", 3, 16, 8), ("g", 1, 8, 4)]
    assert result.left == {"head": "the model returns them"}
    kept = shapes(result.model)
    assert (kept["stem"], kept["deep"], kept["pairs"]) == ((8, 3, 3, 3), (8, 1, 3, 3), (8, 4, 1, 1))
    assert (kept["n0"], kept["side"], kept["head"]) == ((8,), (4, 8, 1, 1), (5, 12))
    groups = [
        helper.get_node_attr_value(one, "group") for one in result.model.graph.node if "group" in str(one)
    ]
    assert groups == [8, 2]


def test_a_bias_that_an_exporter_stored_once_for_two_layers_unites_nothing() -> None:
    weights = {
        "w": random(16, 3, 1, 1), "v": random(16, 16, 1, 1), "zero": random(16), "last": random(2, 16, 1, 1)
    }  # fmt: skip
    nodes = [
        node("Conv", "x w zero", "a"), node("Relu", "a", "b"), node("Conv", "b v zero", "c"),
        node("Conv", "c last", "y"),
    ]  # fmt: skip
    result = removed(model_of(nodes, [1, 3, 8, 8], weights), X)
    assert groups(result) == [(16, 8), (16, 8)]
    assert (shapes(result.model)["zero"], shapes(result.model)["zero/c"]) == ((8,), (8,))


def test_multiplications_are_those_that_the_flops_tool_counts() -> None:
    model = images()
    result = removed(model, X, of="flops", sparsity=0.6)
    assert 0.2 < result.flops <= 0.4
    assert result.flops == pytest.approx(macs(result.model, X) / macs(model, X))


def test_shapes_of_values_are_those_of_the_smaller_model() -> None:
    result = removed(images(), X, round_to=8, sparsity=0.6)
    told = {one.name: one for one in result.model.graph.value_info}
    assert [dim.dim_value for dim in told["h"].type.tensor_type.shape.dim] == [1, 16, 8, 8]


def test_numbers_in_the_file_follow_the_channels() -> None:
    weights = {
        "w": random(16, 3, 1, 1), "shape": [1, 2, 8, -1], "batch": [1], "count": [16], "side": [8],
        "starts": [0], "ends": [12], "axes": [1], "sizes": [6, 6], "last": random(3, 6, 1, 1),
        "expanded": [1, 6, 8, 8], "scale": random(1, 6, 1, 1),
    }  # fmt: skip
    nodes = [
        node("Conv", "x w", "a"), node("Reshape", "a shape", "b"), node("Relu", "b", "c"),
        node("Concat", "batch count side side", "s", axis=0), node("Reshape", "c s", "d"),
        node("Reshape", "a s", "e"), node("Add", "d e", "f"), node("Slice", "f starts ends axes", "g"),
        node("Split", "g sizes", "h i", axis=1), node("Expand", "scale expanded", "j"),
        node("Mul", "h i", "k"),
        node("Mul", "k j", "l"), node("Conv", "l last", "y"),
    ]  # fmt: skip
    model = model_of(nodes, [1, 3, 8, 8], weights)
    result = removed(model, X, importance=lambda values: range(len(next(iter(values.values())))))
    assert result.left == {"last": "the model returns them"}
    assert shapes(result.model)["last"][1] < 6


def test_one_concat_of_a_shape_that_two_nodes_read_in_different_ways_stays() -> None:
    weights = {
        "w": random(8, 3, 1, 1), "v": random(8, 3, 1, 1), "one": [1], "count": [8], "side": [64],
        "last": random(64, 2),
    }  # fmt: skip
    nodes = [
        node("Concat", "one count side", "s", axis=0), node("Conv", "x w", "a"), node("Reshape", "a s", "b"),
        node("Conv", "x v", "c"), node("Reshape", "c s", "d"), node("ReduceMax", "d axes", "e"),
        node("MatMul", "b last", "f"), node("ReduceMean", "f", "g", keepdims=0), node("Mul", "e g", "y"),
    ]  # fmt: skip
    result = removed(model_of(nodes, [1, 3, 8, 8], {**weights, "axes": [1]}), X, exclude="c")
    assert shapes(result.model)["w"] == (4, 3, 1, 1)
    assert shapes(result.model)["v"] == (8, 3, 1, 1)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_channels_that_become_images(mode: str) -> None:
    weights = {"w": random(16, 3, 1, 1), "v": random(8, 4, 1, 1), "last": random(2, 32, 1, 1)}
    nodes = [
        node("Conv", "x w", "a"), node("DepthToSpace", "a", "b", blocksize=2, mode=mode),
        node("Conv", "b v", "c"), node("SpaceToDepth", "c", "d", blocksize=2), node("Conv", "d last", "y"),
    ]  # fmt: skip
    result = removed(model_of(nodes, [1, 3, 8, 8], weights), X)
    assert [shapes(result.model)[name] for name in weights] == [(8, 3, 1, 1), (4, 2, 1, 1), (2, 16, 1, 1)]


def attention(heads: int = 4, features: int = 32) -> ModelProto:
    """Attention by products, with a normalisation of each kind."""
    size = [0, 0, heads, features // heads]
    nodes = [node("LayerNormalization", "x ln ln_b", "n", axis=-1)]
    for name in "qkv":
        nodes += [
            node("MatMul", f"n {name}", f"{name}0"), node("Add", f"{name}0 {name}_b", f"{name}1"),
            node("Reshape", f"{name}1 size", f"{name}2"),
            node("Transpose", f"{name}2", f"{name}3", perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]  # fmt: skip
    nodes += [
        node("MatMul", "q3 k3", "s"), node("Div", "s root", "t"), node("Softmax", "t", "u", axis=-1),
        node("MatMul", "u v3", "w"), node("Transpose", "w", "o0", perm=[0, 2, 1, 3]),
        node("Reshape", "o0 flat", "o1"), node("MatMul", "o1 out", "o2"),
        node("ReduceMean", "o2", "m", axes=[-1]), node("Sub", "o2 m", "c"), node("Mul", "c c", "c2"),
        node("ReduceMean", "c2", "var", axes=[-1]), node("Sqrt", "var", "std"), node("Div", "c std", "d"),
        node("LayerNormalization", "d norm norm_b", "e", axis=-1),
        node("MatMul", "e head", "y"),
    ]  # fmt: skip
    weights: dict[str, Any] = {
        **{name: random(features, features, seed=i) for i, name in enumerate(("q", "k", "v", "out"))},
        **{f"{name}_b": random(features, seed=i) for i, name in enumerate("qkv")},
        "ln": random(features), "ln_b": random(features, seed=1), "norm": random(features, seed=2),
        "norm_b": random(features, seed=3), "head": random(features, 3), "size": size,
        "flat": [0, 0, features], "root": np.array(np.sqrt(features / heads), np.float32),
    }  # fmt: skip
    return model_of(nodes, ["n", "t", features], weights, opset=17)


def test_heads_and_features_of_attention() -> None:
    result = removed(attention(), random(2, 6, 32))
    kept = shapes(result.model)
    assert kept["q"] == kept["k"] == (32, 16)
    assert kept["v"] == (32, 16)
    assert kept["out"] == (16, 16)
    assert kept["norm"] == (16,)
    assert result.left == {"head": "the model returns them"}


def test_zeros_compute_what_masks_do_unless_a_mean_is_over_channels() -> None:
    model, tool = images(), ChannelPruneTool()
    (masked,) = tool.prepare(model, X)
    written = tool.finalize(model).model
    assert shapes(written) == shapes(model)
    np.testing.assert_allclose(run(written, X), masked, atol=1e-6 * np.abs(masked).max())
    model, tool = attention(), ChannelPruneTool()
    tool.prepare(model, random(2, 6, 32))
    with pytest.raises(PruneError, match=r"layer_norm, mean is over .* remove=True"):
        tool.finalize(model)


def test_what_is_not_followed_is_left_and_named() -> None:
    quantized = [
        node("Conv", "x w", "a"), node("Einsum", "a", "b", equation="nchw->nhwc"), node("Flatten", "b", "c"),
        node("DequantizeLinear", "wide factor", "d"), node("MatMul", "c d", "e"), node("MatMul", "e v", "f"),
        node("MatMul", "f last", "y"),
    ]  # fmt: skip
    weights = {
        "w": random(8, 3, 1, 1), "wide": np.ones((512, 8), np.int8), "factor": np.array(0.1, np.float32),
        "v": random(8, 16), "last": random(16, 2),
    }  # fmt: skip
    result = removed(model_of(quantized, [1, 3, 8, 8], weights), X)
    assert result.left["w"] == "channels are not followed through Einsum /b/Einsum"
    assert result.left["/d/DequantizeLinear"] == "DequantizeLinear computes with quantized weights"
    assert shapes(result.model)["v"] == (8, 8)
    assert "/d/DequantizeLinear are left whole" in str(result)


def test_what_bodies_read_is_left() -> None:
    then, other = (
        helper.make_graph(
            [node(type, "a", f"{type}_out")], type, [], [onnx.ValueInfoProto(name=f"{type}_out")]
        )
        for type in ("Relu", "Neg")
    )
    nodes = [
        node("Conv", "x w", "a"), node("ReduceSum", "x", "s", keepdims=0), node("Cast", "s", "b", to=9),
        node("If", "b", "c", then_branch=then, else_branch=other), node("Conv", "c v", "d"),
        node("Conv", "d last", "y"),
    ]  # fmt: skip
    weights = {"w": random(8, 3, 1, 1), "v": random(8, 8, 1, 1), "last": random(2, 8, 1, 1)}
    model = model_of(nodes, [1, 3, 8, 8], weights)
    tool = ChannelPruneTool()
    tool.prepare(model, X)
    result = tool.finalize(model, remove=True)
    assert result.left["w"] == "channels are not followed into the bodies of If /c/If"
    assert shapes(result.model)["v"] == (4, 8, 1, 1)


def test_a_file_is_read_and_another_is_written(tmp_path: Path) -> None:
    onnx.save(images(), tmp_path / "model.onnx")
    tool = ChannelPruneTool()
    (masked,) = tool.prepare(tmp_path / "model.onnx", x=X)
    result = tool.finalize(tmp_path / "model.onnx", remove=True)
    onnx.save(result.model, tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    np.testing.assert_allclose(session.run(None, {"x": X})[0], masked, atol=1e-6 * np.abs(masked).max())
    assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "model.onnx").stat().st_size


def test_a_budget_of_latency_is_measured() -> None:
    result = removed(images(), X, of="latency")
    assert result.latency is not None
    assert result.latency > 0


def test_errors_say_what_was_given(tmp_path: Path) -> None:
    model, tool = images(), ChannelPruneTool()
    with pytest.raises(PruneError, match='"taylor" reads gradients, which parameters of PyTorch alone have'):
        ChannelPruneTool(importance="taylor").prepare(model, X)
    with pytest.raises(PruneError, match="the names z; the model's inputs are x"):
        tool.prepare(model, z=X)
    with pytest.raises(FileError, match=r"nothing\.onnx cannot be read: No such file"):
        tool.prepare(tmp_path / "nothing.onnx", X)
    (tmp_path / "words.onnx").write_text("no model")
    with pytest.raises(PruneError, match=r"words\.onnx is no ONNX model that can be read"):
        tool.prepare(tmp_path / "words.onnx", X)
    (tmp_path / "words.onnx").write_text("hi")
    with pytest.raises(PruneError, match=r"words\.onnx, which is no ONNX model: it names no version"):
        tool.prepare(tmp_path / "words.onnx", X)
    with pytest.raises(PruneError, match="a ModelProto, which is no ONNX model"):
        tool.prepare(ModelProto(), X)
    tool.prepare(model, X)
    with pytest.raises(PruneError, match="a model that it has not met"):
        tool.finalize(images(), remove=True)
    with pytest.raises(PruneError, match="the optimizer list; only one of PyTorch can follow"):
        tool.finalize(model, remove=True, optimizer=[])


def exported(module: nn.Module, *example: torch.Tensor) -> ModelProto:
    logging.disable()  # torch writes a trace of its own work into what listens, as pytest does
    try:
        program = torch.onnx.export(module.eval(), example, dynamo=True, verbose=False)
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    found: ModelProto = program.model_proto
    return found


def groups(result: ChannelPruneResult) -> list[tuple[int, int]]:
    return [(row["channels"], row["kept"]) for row in result.to_dict()["rows"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter about itself
def test_groups_are_those_of_the_module_that_was_exported() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(32, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 5),
    )  # fmt: skip
    x = torch.rand(1, 3, 8, 8)
    result = removed(exported(module, x), x.numpy())
    tool = ChannelPruneTool()
    tool.prepare(module, x)
    smaller = tool.finalize(module, remove=True)
    assert groups(result) == groups(smaller)
    with torch.no_grad():
        np.testing.assert_allclose(run(result.model, x.numpy()), module(x).numpy(), atol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the exporter about itself
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_050"])
def test_groups_are_those_of_models_of_timm(name: str) -> None:
    let_torchvision_load()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    module, x = timm.create_model(name), torch.rand(1, 3, 64, 64)
    for one in module.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.weight, 1, 0.2)  # some are 0 at first: whole branches would be
    model, tool = exported(module, x), ChannelPruneTool(sparsity=0.4)
    result = removed(model, x.numpy(), sparsity=0.4)
    with torch.no_grad():
        tool.prepare(module, x)
    assert sorted(groups(result)) == sorted(groups(tool.result))
    assert result.flops == pytest.approx(tool.result.flops)
    assert result.flops == pytest.approx(macs(result.model, x.numpy()) / macs(model, x.numpy()))

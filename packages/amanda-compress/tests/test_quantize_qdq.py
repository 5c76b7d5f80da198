"""ONNX files with integers: what they compute, against the simulation and ONNX Runtime's own quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from torch import nn

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.errors import ToolError
from amanda.tools.quantize import QuantizeError, QuantizeTool, convert

PLAIN = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
"""No fusions: each QuantizeLinear and DequantizeLinear computes for itself."""
FUSED = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


X = random(2, 4, 8, 8)


def network(path: Path, opset: int = 21) -> Path:
    """Write a convolution, a depthwise one, a product with a transposed weight, and a linear layer."""
    weights = {"w": random(8, 4, 3, 3), "b": random(8), "d": random(8, 1, 3, 3), "m": random(16, 8),
               "g": random(5, 16)}  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "/stem/Conv"),
        helper.make_node("Relu", ["c"], ["r"], "/stem/Relu"),
        helper.make_node("Conv", ["r", "d"], ["e"], "/deep/Conv", group=8),
        helper.make_node("GlobalAveragePool", ["e"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Transpose", ["m"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["f", "t"], ["h"], "/mid/MatMul"),
        helper.make_node("Gemm", ["h", "g"], ["y"], "/head/Gemm", transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], held)
    imports = [helper.make_opsetid("", opset)]
    onnx.save_model(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    return path


def simulated(path: Path, feed: dict[str, Any], **options: Any) -> tuple[QuantizeTool, Any]:
    """Return a calibrated tool, and the outputs of a session in its scope."""
    session, tool = onnxruntime.InferenceSession(path, session_options()), QuantizeTool(**options)
    with amanda.apply(tool):
        with tool.calibrating():
            session.run(None, feed)
        return tool, session.run(None, feed)[0]


def outputs(path: Path, feed: dict[str, Any], level: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # Kernels of x86 processors without VNNI saturate sums of uint8 times int8.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(path, options).run(None, feed)[0]


def stored(path: Path) -> dict[str, str]:
    """Return the types of a file's initializers that are no numbers of float32 or int64."""
    kinds = {one.name: TensorProto.DataType.Name(one.data_type) for one in onnx.load(path).graph.initializer}
    return {name: kind for name, kind in kinds.items() if kind not in ("FLOAT", "INT64")}


GRIDS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"INT8", "UINT8"}),
    ({"per_channel": False, "symmetric_activations": True}, {"INT8"}),
    ({"symmetric_weights": False}, {"UINT8"}),
    ({"weight_bits": 4, "activation_bits": None}, {"INT4"}),
    ({"weight_bits": 4, "activation_bits": None, "symmetric_weights": False}, {"UINT4"}),
    ({"weight_bits": 16, "activation_bits": 16}, {"INT16", "UINT16"}),
    ({"weight_bits": {"stem": 8, "*": 4}, "activation_bits": 8}, {"INT8", "INT4", "UINT8"}),
    ({"weight_bits": {"head": "e5m2", "*": "e4m3"}, "activation_bits": None}, {"FLOAT8E4M3FN", "FLOAT8E5M2"}),
    ({"rounding": "half_away"}, {"INT8", "UINT8"}),
]
COARSE: list[tuple[dict[str, Any], set[str]]] = [
    ({"weight_bits": 3, "activation_bits": 6}, {"INT4", "UINT8"}),
    ({"weight_bits": 12, "activation_bits": 4}, {"INT16", "UINT4"}),
]


@pytest.mark.parametrize(("options", "kinds"), GRIDS + COARSE)
def test_a_file_computes_what_the_simulation_does(
    tmp_path: Path, options: dict[str, Any], kinds: set[str]
) -> None:
    path, feed = network(tmp_path / "model.onnx"), {"x": X}
    tool, wanted = simulated(path, feed, **options)
    result = convert(path, tool, tmp_path / "integers.onnx")
    assert set(stored(tmp_path / "integers.onnx").values()) == kinds
    assert result.model == tmp_path / "integers.onnx"
    most = np.abs(wanted).max()
    np.testing.assert_allclose(outputs(result.model, feed, PLAIN), wanted, rtol=0, atol=1e-6 * most)
    assert np.abs(outputs(path, feed, FUSED) - wanted).max() > 1e-4
    # Kernels of integers add in another order: a value half way between two steps may go to the other one,
    # and in a coarse grid that is much.
    if (options, kinds) in GRIDS:
        np.testing.assert_allclose(outputs(result.model, feed, FUSED), wanted, rtol=0, atol=1e-5 * most)


GROUPS = [
    {"weight_bits": 4, "group_size": 4, "activation_bits": None, "symmetric_weights": symmetric}
    for symmetric in (True, False)
]


@pytest.mark.parametrize("options", [*(options for options, _ in GRIDS + COARSE), *GROUPS])
def test_openvino_computes_what_the_simulation_does(tmp_path: Path, options: dict[str, Any]) -> None:
    openvino = pytest.importorskip("openvino", reason="`nox -s recipes` has openvino")
    path, feed = network(tmp_path / "model.onnx"), {"x": X}
    tool, wanted = simulated(path, feed, **options)
    result = convert(path, tool, tmp_path / "integers.onnx")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}  # else floats are bfloat16 where the processor has it
    compiled = openvino.Core().compile_model(result.model, "CPU", settings)
    # OpenVINO leaves activations of 16 bits as they are.
    close = (2e-4 if options.get("activation_bits") == 16 else 1e-5) * np.abs(wanted).max()
    np.testing.assert_allclose(compiled(feed)[0], wanted, rtol=0, atol=close)
    facts = [one.get_rt_info() for one in compiled.get_runtime_model().get_ordered_ops()]
    kinds = [(one["layerType"].value, one["runtimePrecision"].value) for one in facts]
    products = [kind for layer, kind in kinds if layer in ("Convolution", "FullyConnected")]
    assert len(products) == 4
    if options.get("weight_bits", 8) == 8 and options.get("symmetric_weights", True):
        assert set(products) <= {"u8", "i8"}


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_blocks(tmp_path: Path, symmetric: bool) -> None:
    path, feed = network(tmp_path / "model.onnx"), {"x": X}
    given = {"weight_bits": 4, "group_size": 4, "activation_bits": None, "symmetric_weights": symmetric}
    tool, wanted = simulated(path, feed, **given)
    result = convert(path, tool, tmp_path / "integers.onnx")
    np.testing.assert_allclose(outputs(result.model, feed, PLAIN), wanted, rtol=0, atol=1e-6)
    nodes = [one for one in onnx.load(result.model).graph.node if one.op_type == "DequantizeLinear"]
    blocks = [{a.name: a.i for a in one.attribute} for one in nodes]
    assert blocks == [
        {"axis": 1, "block_size": 4},
        {"axis": 0, "block_size": 4},
        {"axis": 1, "block_size": 4},
    ]
    assert "rounds their inputs to 8 bits" in str(result.remarks)
    assert len(result.left) == 1
    assert "8x1x3x3" in result.left["conv2d of deep"]


def test_files_of_onnxruntime_with_the_same_scales_compute_the_same(tmp_path: Path) -> None:
    path, feed = network(tmp_path / "model.onnx"), {"x": X}
    tool, _ = simulated(path, feed, symmetric_weights=False)  # theirs leaves -128 out of symmetric weights
    ours = convert(path, tool, tmp_path / "ours.onnx").model
    names = {"stem": ("x", "w"), "deep": ("r", "d"), "mid": ("f", "t"), "head": ("h", "g")}
    overrides = {}
    for one in tool.result:
        name = names[one.module][one.tensor == "weight"]
        scales = [
            {"scale": np.array(scale, np.float32), "zero_point": np.array(zero, np.uint8),
             "quant_type": quantization.QuantType.QUInt8}
            for scale, zero in zip(one.scale or (), one.zero_point or (), strict=True)
        ]  # fmt: skip
        overrides[name] = [{**scales[0], "axis": one.axes[0]}, *scales[1:]] if one.axes else scales
    folded = onnx.load(path)  # quantize_static looks for weights among initializers alone
    transpose = next(one for one in folded.graph.node if one.op_type == "Transpose")
    folded.graph.initializer.append(numpy_helper.from_array(random(16, 8).T.copy(), "t"))
    folded.graph.node.remove(transpose)

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._left = [feed]

        def get_next(self) -> Any:
            return self._left.pop() if self._left else None

    quantization.quantize_static(
        folded, tmp_path / "theirs.onnx", Reader(), quantization.QuantFormat.QDQ, per_channel=True,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        extra_options={
            "TensorQuantOverrides": overrides, "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": ["Conv", "MatMul", "Gemm"],
        },
    )  # fmt: skip
    theirs = outputs(tmp_path / "theirs.onnx", feed, PLAIN)
    np.testing.assert_array_equal(outputs(ours, feed, PLAIN), theirs)


def test_weights_are_stored_once_and_small(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(random(64, 64), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "/a/MatMul"),
             helper.make_node("MatMul", ["h", "w"], ["y"], "/b/MatMul")]  # fmt: skip
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, ["n", 64]) for one in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    path = tmp_path / "model.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=7), path)
    feed = {"x": random(3, 64)}
    tool, wanted = simulated(path, feed)
    result = convert(path, tool, tmp_path / "integers.onnx")
    np.testing.assert_allclose(outputs(result.model, feed, PLAIN), wanted, rtol=0, atol=1e-4)
    assert result.before == path.stat().st_size
    assert result.after == result.model.stat().st_size < 0.4 * result.before
    assert [row[-2:] for row in result.rows() if "weight" in row[1]] == [(16384, 4096 + 320), (None, None)]
    assert onnx.load(result.model).opset_import[0].version == 13
    assert "amanda-tools" in onnx.load(result.model).metadata_props[0].value


def test_saved_scales_make_the_same_file(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    tool, _ = simulated(path, {"x": X})
    tool.save(tmp_path / "scales.json")
    again = QuantizeTool()
    again.load(tmp_path / "scales.json")
    made = [convert(path, one, tmp_path / f"{i}.onnx").model for i, one in enumerate((tool, again))]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_a_trained_network_has_the_simulations_accuracy(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for start in range(0, 1200, 30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 30]), y[start : start + 30]).backward()
        optimizer.step()
    window = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "0.weight", "0.bias"], ["0"], "/0/Conv", **window),
        helper.make_node("Relu", ["0"], ["1"]),
        helper.make_node("Conv", ["1", "2.weight", "2.bias"], ["2"], "/2/Conv", **window),
        helper.make_node("Relu", ["2"], ["3"]),
        helper.make_node("Flatten", ["3"], ["4"]),
        helper.make_node("Gemm", ["4", "5.weight", "5.bias"], ["y"], "/5/Gemm", transB=1),
    ]
    held = [numpy_helper.from_array(one.detach().numpy(), name) for name, one in model.named_parameters()]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])]  # fmt: skip
    graph, path = helper.make_graph(nodes, "g", ends[:1], ends[1:], held), tmp_path / "digits.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    feed, target = {"x": x[1200:].numpy()}, y[1200:].numpy()
    tool, wanted = simulated(path, feed)
    result = convert(path, tool, tmp_path / "integers.onnx")
    found = outputs(result.model, feed, FUSED)
    # Sums of floats differ by processor, so that a value between two integers may round either way.
    differences = np.abs(outputs(result.model, feed, PLAIN) - wanted).max(1)
    assert (differences > 1e-5).mean() < 0.01
    assert differences.max() < 0.05
    assert np.abs(found - wanted).mean() < 0.05 * np.abs(outputs(path, feed, FUSED) - wanted).mean()
    right = (found.argmax(1) == target).mean()
    assert right > 0.7
    assert right == pytest.approx((wanted.argmax(1) == target).mean(), abs=0.005)
    assert result.after < 0.5 * result.before


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = network(tmp_path / "model.onnx"), tmp_path / "integers.onnx"
    given, (tool, _) = path.read_bytes(), simulated(path, {"x": X})
    out.hardlink_to(path)
    write = onnx.save_model

    def fail(model: Any, target: Path, **options: Any) -> None:
        write(model, target, **options)
        if target.name == out.name:
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(onnx, "save_model", fail)
        with pytest.raises(OSError, match="no space left"):
            convert(path, tool, out, force=True)
    assert out.read_bytes() == path.read_bytes() == given
    convert(path, tool, out, force=True)
    assert path.read_bytes() == given != out.read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == [out.name, path.name]


def test_modules_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    tool, _ = simulated(path, {"x": X})
    out = tmp_path / "integers.onnx"

    def refused(why: str, *given: Any, **options: Any) -> None:
        with pytest.raises(QuantizeError, match=why):
            convert(*given, **options)
        assert not out.exists()

    refused("has no scale", path, QuantizeTool(), out)
    refused("give the path of another ONNX file", path, tool)
    refused("give the path of another ONNX file", path, tool, path)
    refused("is there already", path, tool, network(tmp_path / "other.onnx"))
    refused("there is no folder", path, tool, tmp_path / "none" / "integers.onnx")
    (tmp_path / "folder.onnx").mkdir()
    refused("it is a folder", path, tool, tmp_path / "folder.onnx", force=True)
    refused("is no ONNX file", tmp_path / "model.pt2", tool, out)
    refused("a float was given", path, 8.0, out)
    refused("give a torch.nn.Module, or the path of an ONNX file", object(), tool)
    refused("of amanda.tools.quantize.weights, or an ONNX file", nn.Linear(4, 4), tool)
    refused("is for ONNX files", nn.Linear(4, 4), tool, out)
    refused("'dynamic' is for models that run", path, QuantizeTool("dynamic"), out)
    refused("none of the 8 ops", path, QuantizeTool(type="add"), out)
    tool.save(tmp_path / "scales.json")
    other = QuantizeTool()
    other.load(tmp_path / "scales.json")
    model = onnx.load(path)
    model.graph.node[7].name = "/tail/Gemm"
    onnx.save_model(model, path)
    with pytest.raises(ToolError, match=r"has no tail/Gemm/input0\.scale among the 16 values"):
        convert(path, other, out)
    tool, _ = simulated(path, {"x": X}, activation_bits="e4m3")
    refused("is in float8_e4m3fn", path, tool, out)

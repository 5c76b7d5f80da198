"""Tools on a session of an ONNX model, and on the module of PyTorch that has its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.coverage import CoverageTool
from amanda.tools.dump import DumpTool
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import Campaign, InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import Grid, QuantizeTool, fake_quantize
from amanda.tools.rewrite import RewriteTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TYPES = ["conv2d", "relu", "adaptive_avg_pool2d", "reshape", "linear"]


class Network(nn.Module):
    """A convolution and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(torch.relu(self.stem(x)), 1)
        made: torch.Tensor = self.head(pooled.flatten(1))
        return made


def session_of(network: Network) -> Any:
    """The network as a session without fusion."""
    nodes = [
        helper.make_node("Conv", ["x", "stem.weight"], ["c"], "/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "/Relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "/GlobalAveragePool"),
        helper.make_node("Flatten", ["p"], ["f"], "/Flatten"),
        helper.make_node("Gemm", ["f", "head.weight", "head.bias"], ["y"], "/head/Gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(value.numpy(), name) for name, value in network.state_dict().items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString(), session_options())


@pytest.fixture(scope="module")
def network() -> Network:
    return Network()


@pytest.fixture(scope="module")
def session(network: Network) -> Any:
    return session_of(network)


FEED = {"x": IMAGE.numpy()}


def both(network: Network, session: Any, eager: Any, graph: Any, times: int = 1) -> tuple[Any, Any]:
    """What the module and the session give under tools of their own."""
    for _ in range(times):
        with torch.no_grad(), amanda.apply(eager):
            expected = network(IMAGE)
        with amanda.apply(graph) as scope:
            (result,) = session.run(None, FEED)
    assert scope.report == []
    return np.asarray(expected), result


def column(result: Any, name: str, **where: Any) -> list[Any]:
    """The values of a column of a result, of the rows where others have given values."""
    names = [one.name for one in result.columns]
    rows = [dict(zip(names, row, strict=True)) for row in result.rows()]
    return [row[name] for row in rows if all(row[key] == value for key, value in where.items())]


def test_flops_are_those_of_the_module(network: Network, session: Any) -> None:
    eager, graph = FlopsTool(), FlopsTool()
    both(network, session, eager, graph)
    for kind in TYPES:
        flops = [sum(column(tool.result, "FLOPs", type=kind)) for tool in (eager, graph)]
        assert flops[0] == flops[1], kind
    assert graph.result.total("macs") == eager.result.total("macs") > 0


def test_statistics_are_those_of_the_module(network: Network, session: Any) -> None:
    eager, graph = StatsTool(), StatsTool()
    both(network, session, eager, graph, times=2)
    for kind in TYPES:
        for name in ("mean", "std", "min", "max"):
            expected = column(eager.result, name, type=kind)
            np.testing.assert_allclose(column(graph.result, name, type=kind), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pattern": "2:4", "type": "linear"}, {"pattern": "structured"}])
def test_masks_are_those_of_the_module(network: Network, session: Any, options: dict[str, Any]) -> None:
    eager, graph = PruneTool(**options), PruneTool(**options)
    expected, result = both(network, session, eager, graph)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert graph.result.zeros == eager.result.zeros > 0
    masks = [
        [np.asarray(value) for name, value in sorted(tool.state_dict().items()) if name.endswith("mask")]
        for tool in (eager, graph)
    ]
    for one, other in zip(*masks, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", ["dynamic", "qat"])
def test_scales_are_those_of_the_module(network: Network, session: Any, method: Any) -> None:
    eager, graph = QuantizeTool(method=method), QuantizeTool(method=method)
    expected, result = both(network, session, eager, graph, times=2)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert np.abs(result - np.asarray(network(IMAGE))).max() > 1e-4


def test_scales_are_calibrated_first_and_used_then(network: Network, session: Any) -> None:
    eager, graph = (QuantizeTool(method="static", calibration=1, sqnr=True) for _ in range(2))
    expected, result = both(network, session, eager, graph, times=3)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away"])
def test_fake_quantisation_becomes_nodes(network: Network, session: Any, rounding: Any) -> None:
    grid = Grid.of(8, symmetric=False)

    @amanda.traceable
    def quantise(x: Any) -> Any:
        return fake_quantize(x, np.float32(0.01), np.float32(3), grid, rounding=rounding)

    class Rectified(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "Relu":
                context.insert_after_op(quantise)
                context.insert_after_op(self.keep)

        @amanda.observer
        def keep(self, value: Any) -> None:
            self.kept = value

    tool = Rectified()
    with amanda.apply(tool) as scope:
        session.run(None, FEED)
    assert scope.report == []
    with torch.no_grad():
        expected = quantise(torch.relu(network.stem(IMAGE)).numpy())
    assert np.mean(np.abs(tool.kept - expected) > 1e-6) < 1e-3  # ties may round otherwise
    assert len(np.unique(tool.kept)) < 256


@pytest.mark.parametrize(
    "options",
    [{"type": "relu", "fault": "zero"}, {"type": "conv2d", "bits": [31]}, {"target": "weights", "bits": [31]},
     {"target": "inputs", "fault": "value", "value": 0.5}],
)  # fmt: skip
def test_faults_in_all_elements_are_those_of_the_module(
    network: Network, session: Any, options: dict[str, Any]
) -> None:
    eager, graph = (InjectTool(probability=1.0, **options) for _ in range(2))
    expected, result = both(network, session, eager, graph)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert graph.result.total == eager.result.total > 0
    names = ("type", "tensor", "dtype", "element", "bits")
    for name in names:
        assert column(graph.result, name) == column(eager.result, name)
    (again,) = session.run(None, FEED)
    assert np.abs(again - result).max() > 1e-3


def test_trials_with_faults_in_a_session_are_the_same_again(session: Any) -> None:
    campaign = Campaign(InjectTool(type="conv2d", bits=[30], seed=3), trials=6)
    report = campaign.run(lambda: session.run(None, FEED))
    assert report.to_dict() == campaign.run(lambda: session.run(None, FEED)).to_dict()
    assert report.count("masked") < 6
    assert {trial.injections[0].type for trial in report.trials} == {"conv2d"}


def test_the_others_see_every_node(session: Any, tmp_path: Path) -> None:
    tools = TraceTool(), DumpTool(tmp_path), NanTool(), CoverageTool(), ProfileTool()
    bare = session.run(None, FEED)[0]
    with amanda.apply(*tools) as scope:
        np.testing.assert_array_equal(session.run(None, FEED)[0], bare)
    assert scope.report == []
    trace, dump, nan, coverage, profile = (tool.result for tool in tools)
    assert column(trace, "type") == TYPES
    assert set(column(dump, "type")) == set(TYPES)
    assert "Checked 5 executions of ops (not accumulation of gradients); none produced" in str(nan)
    assert sum(column(coverage, "executed")) == 5
    assert sorted(column(profile, "type")) == sorted(TYPES)


def ran(tool: Any, kind: str, given: dict[str, np.ndarray], **attributes: Any) -> Any:
    """Return the result of a tool for one operator of ONNX, or of Microsoft's."""
    types = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.uint8): onnx.TensorProto.UINT8}
    node = helper.make_node(kind, list(given), ["made"], **attributes)
    inputs = [helper.make_tensor_value_info(name, types[one.dtype], one.shape) for name, one in given.items()]
    result = onnx.TensorProto.INT32 if kind.endswith("Integer") else onnx.TensorProto.FLOAT
    graph = helper.make_graph([node], "one", inputs, [helper.make_tensor_value_info("made", result, None)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with amanda.apply(tool):
        session.run(None, given)
    return tool.result


def ones(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


MICROSOFT = {"domain": "com.microsoft"}
PRODUCTS: list[tuple[str, dict[str, Any], dict[str, np.ndarray], int]] = [
    ("Einsum", {"equation": "...ij,...jk->...ik"}, ones(a=(2, 3, 4), b=(2, 4, 5)), 120),
    ("MatMul", {}, ones(a=(2, 3, 4), b=(2, 4, 5)), 120),
    ("Gemm", {"transA": 1}, ones(a=(4, 3), b=(4, 5)), 60),
    ("FusedMatMul", {"transA": 1, **MICROSOFT}, ones(a=(4, 3), b=(4, 5)), 60),
    ("MatMulInteger", {}, {name: np.ones((4, 4), np.uint8) for name in "ab"}, 64),
    ("LSTM", {"hidden_size": 5}, ones(x=(7, 2, 3), w=(1, 20, 3), r=(1, 20, 5)), 7 * 2 * 160),
    ("GRU", {"hidden_size": 5}, ones(x=(7, 2, 3), w=(1, 15, 3), r=(1, 15, 5)), 7 * 2 * 120),
    ("MultiHeadAttention", {"num_heads": 2, **MICROSOFT}, ones(q=(1, 6, 8), k=(1, 5, 8), v=(1, 5, 8)), 480),
    ("Attention", {"num_heads": 2, **MICROSOFT}, ones(x=(1, 6, 8), w=(8, 24), b=(24,)), 6 * 192 + 2 * 288),
]


@pytest.mark.parametrize(("kind", "attributes", "given", "macs"), PRODUCTS, ids=[one[0] for one in PRODUCTS])
def test_a_product_of_any_name_is_counted(
    kind: str, attributes: dict[str, Any], given: dict[str, np.ndarray], macs: int
) -> None:
    result = ran(FlopsTool(), kind, given, **attributes)
    assert result.total("macs") == macs
    assert not result.unsupported


def test_queries_keys_and_values_alone_are_quantised_of_attention() -> None:
    given = ones(q=(1, 6, 8), k=(1, 5, 8), v=(1, 5, 8), bias=(24,))
    result = ran(QuantizeTool("dynamic"), "MultiHeadAttention", given, num_heads=2, **MICROSOFT)
    assert [row.tensor for row in result] == ["input 0", "input 1", "input 2"]


def test_nan_in_a_weight_of_a_session_is_told() -> None:
    broken = Network()
    with torch.no_grad():
        broken.head.weight[0] = float("nan")
    tool, session = NanTool(), session_of(broken)
    with amanda.apply(tool):
        session.run(None, FEED)
    assert not tool.result.findings
    assert tool.result.sentence.startswith("First NaN: input 1 of linear has 4 NaN of 20, read in head ")


def test_batch_normalisation_of_a_session_is_left_as_it_is() -> None:
    names, values = ["scale", "shift", "mean", "variance"], np.array([0.5, 1, 1.5, 2], np.float32)
    kernel = np.ones((4, 3, 1, 1), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "kernel"], ["c"]),
            helper.make_node("BatchNormalization", ["c", *names], ["y"]),
        ],
        "normalised",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4, 8, 8])],
        [
            numpy_helper.from_array(kernel, "kernel"),
            *(numpy_helper.from_array(values, one) for one in names),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    (wanted,), tool = session.run(None, {"x": IMAGE.numpy()}), RewriteTool("fold_batch_norm")
    with amanda.apply(tool):
        session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
        (found,) = session.run(None, {"x": IMAGE.numpy()})
    assert np.array_equal(found, wanted)
    assert not tool.result.matches


def looping() -> onnx.ModelProto:
    """A loop whose body takes the logarithm of a product with a weight in float16, less 1."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Cast", ["half"], ["whole"], "cast", to=1),
        helper.make_node("Transpose", ["whole"], ["turned"], "turn"),
        helper.make_node("MatMul", ["v", "turned"], ["m"], "product"),
        helper.make_node("Sub", ["m", "one"], ["s"], "less"),
        helper.make_node("Log", ["s"], ["l"], "log"),
        helper.make_node("Identity", ["c"], ["on"], "on"),
    ]
    body = helper.make_graph(
        nodes, "body", [value("i", 7, []), value("c", 9, []), value("v", 1, [2, 2])],
        [value("on", 9, []), value("l", 1, [2, 2])],
    )  # fmt: skip
    weights = {"half": np.float16([[0.5, 2], [0.3, 1]]), "one": np.float32(1), "n": np.array(3)}
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "x"], ["y"], "loop", body=body)], "g", [value("x", 1, [2, 2])],
        [value("y", 1, [2, 2])], [numpy_helper.from_array(one, name) for name, one in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_nan_in_a_loop_is_found_at_the_op_in_its_body() -> None:
    tool, session = NanTool(), onnxruntime.InferenceSession(looping().SerializeToString(), session_options())
    with amanda.apply(tool) as scope:
        (made,) = session.run(None, {"x": np.float32([[3, 5], [4, 6]])})
    assert np.isnan(made).any()
    assert scope.report == []
    (found,) = tool.result.findings
    assert (found.type, found.module) == ("log", "loop/body")


@pytest.mark.parametrize("make", [PruneTool, lambda: QuantizeTool("static", activation_bits=None)])
def test_a_weight_behind_a_cast_in_a_body_is_changed_in_a_session_and_in_a_file(
    make: Any, tmp_path: Path
) -> None:
    source, feed = tmp_path / "model.onnx", {"x": np.float32([[30, 50], [40, 60]])}
    onnx.save(looping(), source)
    session, tool = onnxruntime.InferenceSession(str(source), session_options()), make()
    (bare,) = session.run(None, feed)
    with amanda.apply(tool) as scope:
        (changed,) = session.run(None, feed)
    assert scope.report == []
    assert not np.array_equal(changed, bare, equal_nan=True)
    written = amanda.instrument(source, tool, out=tmp_path / "changed.onnx")
    assert [(one.op, one.stored) for one in written.inlined] == [("loop/body/product", True)]
    given = onnxruntime.InferenceSession(str(written.path), session_options()).run(None, feed)
    np.testing.assert_array_equal(given[0], changed)

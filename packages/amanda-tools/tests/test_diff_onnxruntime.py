"""A model of PyTorch against what was exported of it, and sessions of ONNX Runtime against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from amanda.errors import AmandaError
from amanda.tools.diff import diff

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # its exporter's


class Network(nn.Module):
    """A block whose activation and residual sum are in no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(self.norm(x)))).tanh()
        scores: Tensor = self.head(x)
        return scores


X = torch.linspace(-1, 1, 48).reshape(6, 8)


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="module")
def exported(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "network.onnx"
    with torch.no_grad():
        torch.onnx.export(network, (X,), dynamo=True, verbose=False).save(path)
    return path


def run(path: Path, level: Any = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL) -> Callable[[], Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(path, options)
    feed = {session.get_inputs()[0].name: X.numpy()}
    return lambda: session.run(None, feed)


def of_torch(model: nn.Module) -> Callable[[], Tensor]:
    def program() -> Tensor:
        with torch.no_grad():
            made: Tensor = model(X)
        return made

    return program


def test_an_exported_model_agrees_with_its_model(network: Network, exported: Path) -> None:
    result = diff(of_torch(network), run(exported), control="float64")
    assert not result, result.sentence
    assert set(result.modules) == {"norm", "up", "act", "down", "head"}
    assert not any("without a tool" in one for one in result.told)


def _epsilon(model: Network) -> None:
    model.norm.eps = 1e-3


def _activation(model: Network) -> None:
    model.act.approximate = "tanh"


def _row(model: Network) -> None:
    model.down.weight.data[3] *= 1.001


@pytest.mark.parametrize(("spoil", "module"), [(_epsilon, "norm"), (_activation, "act"), (_row, "down")])
def test_a_change_is_named_at_its_module(network: Network, exported: Path, spoil: Any, module: str) -> None:
    other = copy.deepcopy(network)
    spoil(other)
    for sides in ((of_torch(other), run(exported)), (run(exported), of_torch(other))):
        first = diff(*sides, rtol=1e-6).first
        assert first is not None
        assert (first.module, first.other_module) == (module, module)


def test_two_optimisation_levels_agree(exported: Path) -> None:
    plain = run(exported, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    result = diff(plain, run(exported))
    assert not result, result.sentence


def test_a_node_that_differs_in_two_files_is_named(exported: Path, tmp_path: Path) -> None:
    model = onnx.load(exported)
    node = next(one for one in model.graph.node if one.op_type == "LayerNormalization")
    next(one for one in node.attribute if one.name == "epsilon").f = 1e-3
    onnx.save(model, tmp_path / "changed.onnx")
    result = diff(run(exported), run(tmp_path / "changed.onnx"))
    assert result.first is not None
    assert (result.first.type, result.first.module, result.first.inputs) == ("layer_norm", "norm", True)
    assert not diff(run(exported), run(exported))


def test_nodes_without_modules_are_not_compared_with_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "first"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["r"]),
        onnx.helper.make_node("MatMul", ["r", "second"], ["y"]),
    ]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 4]) for name in "xy")
    weights = [
        onnx.numpy_helper.from_array(model[i].weight.detach().numpy().T.copy(), name)
        for i, name in ((0, "first"), (2, "second"))
    ]
    made = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "graph", [x], [y], weights),
        opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(made.SerializeToString())
    values = torch.rand(3, 4)
    with pytest.raises(AmandaError, match="have no op in common"):
        diff(lambda: model(values), lambda: session.run(None, {"x": values.numpy()}))

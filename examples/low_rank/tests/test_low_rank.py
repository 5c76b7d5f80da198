"""The tool in every mode: eager, compiled, TensorFlow, ONNX Runtime, and in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amanda
from amanda.tools.low_rank import LowRankTool

RANK = 4
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


def low(weight: Any) -> Any:
    """A matrix (outputs, inputs) of the rank, by hand."""
    left = np.linalg.svd(weight, full_matrices=False)[0][:, :RANK]
    return left @ (left.T @ weight)


def torch_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))


def by_hand(model: Any) -> Any:
    """The same model with weights that were made by hand."""
    import torch

    for layer in (model[0], model[2]):
        layer.weight.data = torch.from_numpy(low(layer.weight.detach().numpy()))
    return model


@pytest.mark.parametrize("mode", ["eager", "compiled op by op", "compiled"])
def test_pytorch_trains_saves_and_finalizes(mode: str, tmp_path: Path) -> None:
    import torch

    model, tool, x = torch_model(), LowRankTool(RANK), torch.from_numpy(X)
    call = model if mode == "eager" else torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with amanda.apply(tool, compiled="instrument" if mode == "compiled" else "eager"):
        torch.testing.assert_close(call(x), by_hand(torch_model())(x))
        for _ in range(5):
            loss = call(x).square().mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        y = call(x).detach()
    assert losses == sorted(losses, reverse=True)
    torch.save(tool.state_dict(), tmp_path / "state.pt")
    again = LowRankTool(RANK)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    with amanda.apply(again), torch.no_grad():
        torch.testing.assert_close(model(x), y)
    again.finalize(model)
    torch.testing.assert_close(model(x).detach(), y)
    assert [np.linalg.matrix_rank(model[i].weight.detach().numpy()) for i in (0, 2)] == [RANK, RANK]
    assert "2 weights (896 elements)" in str(again.result)


@pytest.mark.parametrize("mode", ["eager", "function", "fit"])
def test_tensorflow_trains_saves_and_finalizes(mode: str, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(12)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    one, _, two, _ = model.get_weights()
    wanted = np.maximum(X @ low(one.T).T, 0) @ low(two.T).T
    tool, call = LowRankTool(RANK), tf.function(model) if mode == "function" else model
    with amanda.apply(tool):
        np.testing.assert_allclose(call(X), wanted, rtol=1e-4, atol=1e-5)
        if mode == "fit":
            model.fit(X, np.zeros((4, 12)), epochs=3, verbose=0)
        y = np.asarray(call(X))
    np.savez(tmp_path / "state.npz", **tool.state_dict())
    again = LowRankTool(RANK)
    with np.load(tmp_path / "state.npz") as state:
        again.load_state_dict(dict(state))
    with amanda.apply(again):
        np.testing.assert_allclose(model(X), y, rtol=1e-4, atol=1e-5)
    again.finalize(model)
    np.testing.assert_allclose(model(X), y, rtol=1e-4, atol=1e-5)
    assert np.linalg.matrix_rank(model.get_weights()[0]) == RANK


def test_a_framework_of_others_trains_saves_and_finalizes() -> None:
    pytest.importorskip("fake_arrays")  # how its tensors are computed with, and where its parameters are
    from amanda.testing import FakeDriver, attached, fake

    layer, x = fake.Linear(fake.Parameter([3.0, -0.1, 0.2, -2.0], (2, 2))), fake.tensor([[1.0, 2.0]])
    tool, again = LowRankTool(1), LowRankTool(1)
    with attached(FakeDriver), amanda.apply(tool):
        for _ in range(3):
            layer.weight.grad = None
            fake.sum(layer(x)).backward()
            assert layer.weight.grad is not None
            new = np.subtract(layer.weight.numbers, np.multiply(0.01, layer.weight.grad.numbers))
            layer.weight.assign(fake.Tensor(new.tolist(), (2, 2)))
        y = layer(x).numbers
    again.load_state_dict(tool.state_dict())
    with attached(FakeDriver), amanda.apply(again):
        np.testing.assert_allclose(layer(x).numbers, y)
    again.finalize(layer)
    np.testing.assert_allclose(layer(x).numbers, y)
    assert np.linalg.matrix_rank(np.reshape(layer.weight.numbers, (2, 2))) == 1


def onnx_model(place: Path) -> tuple[Path, Any]:
    onnx = pytest.importorskip("onnx")
    helper, random = onnx.helper, np.random.default_rng(0)
    one, two = (random.standard_normal(shape, np.float32) for shape in ((16, 32), (12, 32)))
    nodes = [
        helper.make_node("MatMul", ["x", "one"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "two"], ["y"], transB=1),
    ]  # fmt: skip
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, [4, 16])],
        [helper.make_tensor_value_info("y", kind, [4, 12])],
        [onnx.numpy_helper.from_array(one, "one"), onnx.numpy_helper.from_array(two, "two")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, place / "model.onnx")
    return place / "model.onnx", np.maximum(X @ low(one.T).T, 0) @ low(two).T


def test_onnx_runtime_runs_and_a_file_is_written(tmp_path: Path) -> None:
    path, wanted = onnx_model(tmp_path)
    import onnxruntime

    from amanda.drivers.onnxruntime import instrument, session_options

    with amanda.apply(LowRankTool(RANK)):
        session = onnxruntime.InferenceSession(path, session_options())
        np.testing.assert_allclose(session.run(None, {"x": X})[0], wanted, rtol=1e-4, atol=1e-5)
    import onnx

    onnx.save(instrument(path, LowRankTool(RANK)), tmp_path / "low.onnx")
    found = onnxruntime.InferenceSession(tmp_path / "low.onnx").run(None, {"x": X})[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "low.onnx").stat().st_size < path.stat().st_size + 500


def test_the_command_finds_it_by_its_name() -> None:
    tool = amanda.load_tool("low_rank", rank=3)
    assert isinstance(tool, LowRankTool)
    assert tool.rank == 3

"""Scales of a calibration, written into files of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.command import instrument
from amanda.tools.quantize import QuantizeError, QuantizeTool

X = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_program_is_quantised_as_the_module_is(tmp_path: Path, per_channel: bool) -> None:
    model, tool = network(), QuantizeTool(per_channel=per_channel)
    with torch.no_grad(), amanda.apply(tool):
        with tool.calibrating():
            model(X)
        running = model(X)
    tool.save(tmp_path / "scales.json")
    torch.export.save(torch.export.export(model, (X,)), tmp_path / "model.pt2")
    spec = f"quantize:per_channel={str(per_channel).lower()}"
    state = str(tmp_path / "scales.json")
    out = str(tmp_path / "quantised.pt2")
    assert instrument([str(tmp_path / "model.pt2"), "-q", "-t", spec, "--state", state, "-o", out]) == 0
    with torch.no_grad():
        found = torch.export.load(out).module()(X)
        assert not torch.equal(running, model(X))
    assert torch.equal(found, running)
    weight = torch.export.load(out).state_dict["0.weight"]
    assert len(weight[0].unique()) <= 256
    assert not torch.equal(weight, model[0].weight)


def test_an_onnx_file_is_quantised_as_its_session_is(tmp_path: Path) -> None:
    weight = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    node = helper.make_node("MatMul", ["x", "weight"], ["y"], name="/head/MatMul")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "weight")])
    imports = [helper.make_opsetid("", 18)]
    onnx.save_model(helper.make_model(graph, opset_imports=imports, ir_version=9), tmp_path / "model.onnx")
    given = np.linspace(-2, 3, 16, dtype=np.float32).reshape(2, 8)
    session, tool = onnxruntime.InferenceSession(tmp_path / "model.onnx", session_options()), QuantizeTool()
    with amanda.apply(tool):
        with tool.calibrating():
            session.run(None, {"x": given})
        (running,) = session.run(None, {"x": given})
    tool.save(tmp_path / "scales.safetensors")
    again = QuantizeTool()
    again.load(tmp_path / "scales.safetensors")
    amanda.instrument(tmp_path / "model.onnx", again, out=tmp_path / "quantised.onnx")
    made = onnxruntime.InferenceSession(tmp_path / "quantised.onnx", session_options())
    np.testing.assert_array_equal(made.run(None, {"x": given})[0], running)
    assert not np.array_equal(running, session.run(None, {"x": given})[0])


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "has no scale, and nothing runs"), ({"method": "dynamic"}, "'dynamic' is for models that run")],
)
def test_scales_that_only_a_run_gives_are_missed(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    torch.export.save(torch.export.export(network(), (X,)), tmp_path / "model.pt2")
    with pytest.raises(QuantizeError, match=why):
        amanda.instrument(tmp_path / "model.pt2", QuantizeTool(**options), out=tmp_path / "out.pt2")
    assert not (tmp_path / "out.pt2").exists()

"""Architecture search on ONNX Runtime: choices that need no gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import nn

import amanda
from amanda.tools.search import Choice, Search, SearchTool


def test_a_search_over_a_session_agrees_with_the_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3))
    x = torch.rand(5, 6)
    named = {name.replace(".", "_"): one.detach().numpy() for name, one in model.named_parameters()}
    made = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "0_weight", "0_bias"], ["a"], transB=1),
            helper.make_node("Sigmoid", ["a"], ["b"]),
            helper.make_node("Gemm", ["b", "2_weight", "2_bias"], ["y"], transB=1),
        ],
        "model",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (5, 6))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (5, 3))],
        [numpy_helper.from_array(one, name) for name, one in named.items()],
    )
    file = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    choices: list[Choice | str] = [
        "linear=keep|bits4|width0.5", Choice(["keep", "relu", "gelu", "silu", "skip"], type="sigmoid")
    ]  # fmt: skip

    def run() -> Any:
        return session.run(None, {"x": x.numpy()})[0]

    tool, own = SearchTool(choices), SearchTool(choices)
    tool.prepare(run)
    own.prepare(model, x)
    assert [one.labels for one in tool.sites] == [one.labels for one in own.sites]
    assert tool.size() == own.size()
    result = Search(tool, lambda: run().sum(), "random", costs=["size"], progress=False).run(trials=20)
    assert len(result.trials) == 20
    for trial in result.trials:
        own.architecture = dict(zip(own.space, trial.architecture.values(), strict=True))
        tool.architecture = trial.architecture
        with amanda.apply(own), torch.no_grad():
            wanted = model(x).numpy()
        with amanda.apply(tool):
            np.testing.assert_allclose(run(), wanted, rtol=1e-4, atol=1e-5)

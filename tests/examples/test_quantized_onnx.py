"""The table of an ONNX file with integers, of a small network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.mark.slow
def test_a_row_for_each_method(
    example: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = example("quantized_onnx")
    random = np.random.default_rng(0)
    held = [numpy_helper.from_array(random.normal(size=(64, 64)).astype(np.float32), name) for name in "ab"]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 64]) for name in "xy"]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"], "/0/MatMul"),
             helper.make_node("Relu", ["h"], ["r"]),
             helper.make_node("MatMul", ["r", "b"], ["y"], "/1/MatMul")]  # fmt: skip
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    path = tmp_path / "model.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    monkeypatch.setattr(sys, "argv", ["quantized_onnx", str(path), "x=4x64", "--rounds", "1"])
    script.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["float32", *script.METHODS]
    for _, size, _, simulated, found in rows[1:]:
        assert float(size) <= float(rows[0][1])
        assert float(found) < 0.05 * float(simulated)

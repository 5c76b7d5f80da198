"""`amanda instrument`: what it writes, tells and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amanda.backend import Artefact
from amanda.tools.command import instrument

WEIGHT = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product with a weight, where the test is."""
    monkeypatch.chdir(tmp_path)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    node = helper.make_node("MatMul", ["x", "weight"], ["y"], name="/head/MatMul")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(WEIGHT, "weight")])
    imports = [helper.make_opsetid("", 18)]
    onnx.save_model(helper.make_model(graph, opset_imports=imports, ir_version=9), "model.onnx")
    return tmp_path / "model.onnx"


def weight(path: str) -> Any:
    (initializer,) = onnx.load(path).graph.initializer
    return numpy_helper.to_array(initializer)


def test_a_copy_is_written_and_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model.onnx", "-t", "prune:sparsity=0.75,out=weights.csv", "-o", "out.onnx"]
    arguments += ["--report", "done.json"]
    assert instrument(arguments) == 0
    assert (weight("out.onnx") == 0).mean() == 0.75
    captured = capsys.readouterr()
    assert captured.out == "out.onnx\n"
    assert "1 ops of model.onnx were analysed; the copy has 1 routines." in captured.err
    assert (
        "Not instrumented: backward ops for PruneTool: a file holds the forward pass alone." in captured.err
    )
    report = json.loads(Path("done.json").read_text())
    assert report["schema"] == "amanda.instrument"
    assert report["rows"] == [
        {"type": "matmul", "tool": "PruneTool", "before": 0, "instead": 0, "after": 0, "stored": 1}
    ]
    assert report["routines"][0]["op"] == "/head/MatMul"
    assert Path("weights.csv").read_text().count("matmul") == 1
    notes = {entry.key: entry.value for entry in onnx.load("out.onnx").metadata_props}
    assert json.loads(notes["amanda"])[0]["tools"] == ["prune:sparsity=0.75,out=weights.csv"]
    assert instrument([*arguments, "-q"]) == 1
    assert "out.onnx is there already" in capsys.readouterr().err
    assert instrument([*arguments, "-q", "--force"]) == 0
    assert capsys.readouterr().err == ""


def test_a_tool_that_inserts_nothing_beside_another_is_told(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instrument(["model.onnx", "-t", "trace", "-t", "prune", "-o", "out.onnx"]) == 0
    stderr = capsys.readouterr().err
    assert "Not instrumented: TraceTool: it inserts nothing at any op: its options leave nothing" in stderr
    assert "PruneTool: it inserts nothing" not in stderr


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_masks_that_were_learnt_come_from_a_file(model: Path, suffix: str) -> None:
    mask = np.zeros(WEIGHT.shape, bool)
    mask[2] = True
    state = {"head/MatMul/mask": mask, "head/MatMul/updated": np.array([3]), "step": np.array(4)}
    path = f"masks{suffix}"
    if suffix == ".npz":
        np.savez(path, **state)
    else:
        from safetensors.numpy import save_file

        save_file(state, path)
    assert instrument(["model.onnx", "-t", "prune", "--state", path, "-o", "out.onnx"]) == 0
    np.testing.assert_array_equal(weight("out.onnx"), WEIGHT * mask)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-t", "flops"], 1, "FlopsTool, insert_after_op("),
        (
            ["-t", "trace"],
            1,
            "TraceTool: it inserts nothing at any op: its options leave nothing for it to do",
        ),
        (["-t", "remat"], 1, "remat acts while a model is trained in PyTorch's eager mode"),
        (["-t", "inject"], 1, "InjectTool, insert_"),
        (["-t", "quantize"], 1, "[amanda] tool QuantizeTool, before_forward_op of MatMul"),
        (["-t", "prune:sparsty=1"], 2, "did you mean sparsity?"),
        (["-t", "prune:start=2"], 2, "tool prune: start chooses steps, and a file has none"),
        (["-t", "prune:type=conv2d"], 1, "the tools insert nothing at any of the 1 ops"),
        (["-t", "prune:type=conv2d"], 1, "so nothing was written; there are matmul\n"),
        (
            ["-t", "flops:type=conv2d"],
            1,
            "FlopsTool: it inserts nothing at any op: it is restricted to other",
        ),
        ([], 2, "no tool is given"),
        (
            ["-t", "prune", "--state", "nowhere.npz"],
            2,
            "nowhere.npz cannot be read: No such file",
        ),
        (["-t", "prune", "--state", "model.onnx"], 2, "it ends in none of .npz, .safetensors"),
        (["-t", "prune", "--state", "bad.npz"], 2, "bad.npz is no .npz file of plain arrays"),
        (["-t", "prune", "--state", "dump=bad.npz"], 2, "dump=bad.npz"),
        (["-t", "prune", "--state", "other.npz"], 1, "has no head/MatMul/mask among the 1 values"),
        (["-t", "prune", "--report", "done.pdf"], 2, "done.pdf ends in none of"),
    ],
)
def test_faults_are_told_and_nothing_is_written(
    model: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.npz").write_bytes(b"no arrays")
    np.savez("other.npz", **{"encoder/linear/mask": np.ones(3, bool)})
    assert instrument(["model.onnx", *arguments, "-o", "out.onnx"]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
    assert not Path("out.onnx").exists()


def test_an_interrupt_leaves_no_half_file(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from amanda.drivers.onnxruntime._file import OnnxFile

    def interrupted(self: Artefact, path: Path, about: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(OnnxFile, "write", interrupted)
    assert instrument(["model.onnx", "-t", "prune", "-o", "out.onnx"]) == 130
    assert "amanda instrument: interrupted" in capsys.readouterr().err
    assert [path.name for path in model.parent.iterdir()] == ["model.onnx"]

"""ONNX files with routines written into them, which ONNX Runtime alone loads and runs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import amanda
from amanda.drivers.onnxruntime import instrument, session_options
from amanda.errors import ArtefactError, NotTraceableError
from amanda.tools.prune import PruneError, PruneTool
from amanda.tools.prune.channels import ChannelPruneTool
from amanda.tools.quantize import QuantizeError, QuantizeTool, convert

ALONE = """
import sys
sys.modules["amanda"] = None
import numpy as np, onnxruntime
model, given, out = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
(name,) = [one.name for one in session.get_inputs()]
found = session.run(None, {name: np.load(given)})
np.savez(out, **{one.name: value for one, value in zip(session.get_outputs(), found)})
"""

WEIGHT = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
X = np.linspace(-1, 1, 2 * 64, dtype=np.float32).reshape(2, 64)


def alone(model: Path, example: NDArray[Any], tmp_path: Path) -> dict[str, NDArray[Any]]:
    """What a model gives in a process that has no Amanda."""
    np.save(tmp_path / "given.npy", example)
    out = tmp_path / "out.npz"
    command = [sys.executable, "-c", ALONE, str(model), str(tmp_path / "given.npy"), str(out)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)


@pytest.fixture(params=["inside", "external"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A product and a rectifier, with its weight in the file or beside it."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy")
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="/layer/MatMul"),
        helper.make_node("Relu", ["h"], ["y"], name="/layer/Relu"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(WEIGHT, "weight")])
    imports = [helper.make_opsetid("", 18)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=9, producer_name="someone")
    helper.set_model_props(proto, {"licence": "theirs"})
    path = tmp_path / "model.onnx"
    onnx.save_model(proto, path, save_as_external_data=request.param == "external", location="model.data")
    assert (tmp_path / "model.data").exists() == (request.param == "external")
    return path


class Shifting(amanda.Tool):
    """Masks weights of products for good, and adds to what rectifiers give."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "MatMul":
            context.insert_before_op(self.mask, inputs=[1])
        elif context.get_op_type() == "Relu":
            context.insert_after_op(self.shift)

    @amanda.traceable
    def mask(self, weight: Any) -> Any:
        return weight * (WEIGHT > 0)

    @amanda.traceable
    def shift(self, y: Any) -> Any:
        return y + np.float32(1)


def test_a_copy_runs_without_amanda_and_keeps_what_the_model_says(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    done = amanda.instrument(model, Shifting(), out=tmp_path / "out.onnx")
    amanda.instrument(tmp_path / "out.onnx", Shifting(), out=tmp_path / "twice.onnx")
    expected = np.maximum(X @ (WEIGHT * (WEIGHT > 0)), 0) + 1
    np.testing.assert_allclose(alone(tmp_path / "out.onnx", X, tmp_path)["y"], expected, rtol=1e-5)
    np.testing.assert_allclose(alone(tmp_path / "twice.onnx", X, tmp_path)["y"], expected + 1, rtol=1e-5)
    assert model.read_bytes() == before
    assert [entry.stored for entry in done.inlined] == [True, False]
    copy = onnx.load(tmp_path / "twice.onnx")
    onnx.checker.check_model(copy, full_check=True)
    properties = {entry.key: entry.value for entry in copy.metadata_props}
    assert (copy.producer_name, copy.ir_version, properties["licence"]) == ("someone", 9, "theirs")
    assert len(json.loads(properties["amanda"])) == 2
    sizes = [numpy_helper.to_array(tensor).size for tensor in copy.graph.initializer]
    assert sizes.count(WEIGHT.size) == 1
    external = (tmp_path / "model.data").exists()
    assert (tmp_path / "out.onnx.data").exists() == external
    assert (tmp_path / "out.onnx").stat().st_size < 3000 or not external


def test_a_pruned_copy_gives_what_the_tool_gives_when_it_runs(model: Path, tmp_path: Path) -> None:
    amanda.instrument(model, PruneTool(), out=tmp_path / "pruned.onnx")
    session = onnxruntime.InferenceSession(model, session_options())
    with amanda.apply(PruneTool()):
        running = session.run(None, {"x": X})[0]
    pruned_session = onnxruntime.InferenceSession(tmp_path / "pruned.onnx", session_options())
    np.testing.assert_array_equal(pruned_session.run(None, {"x": X})[0], running)
    assert not np.allclose(running, session.run(None, {"x": X})[0])


@pytest.mark.parametrize("importance", ["gradient", "wanda"])
def test_what_no_file_tells_is_an_error(model: Path, tmp_path: Path, importance: Any) -> None:
    with pytest.raises(amanda.AmandaError, match=f"importance='{importance}' is computed while a model runs"):
        amanda.instrument(model, PruneTool(importance=importance), out=tmp_path / "pruned.onnx")
    assert not (tmp_path / "pruned.onnx").exists()


def test_a_trained_model_is_pruned_as_when_it_runs_and_as_by_hand(tmp_path: Path) -> None:
    """The transcription network of basic-pitch (Spotify, 2022); the package itself is not imported."""
    package = importlib.util.find_spec("basic_pitch")
    assert package is not None
    (folder,) = package.submodule_search_locations or ()
    model = Path(folder, "saved_models", "icassp_2022", "nmp.onnx")
    time = np.arange(43844) / 22050
    audio = (np.sin(2764 * time) + np.sin(4140 * time)).astype(np.float32)[None, :, None]
    tool = PruneTool()
    done = amanda.instrument(model, tool, out=tmp_path / "pruned.onnx")
    outputs = alone(tmp_path / "pruned.onnx", audio, tmp_path)
    session = onnxruntime.InferenceSession(model, session_options())
    (input_info,), names = session.get_inputs(), [output.name for output in session.get_outputs()]
    with amanda.apply(PruneTool()):
        running = session.run(None, {input_info.name: audio})
    by_hand = onnx.load(model)
    convolutions = [node for node in by_hand.graph.node if node.op_type == "Conv"]
    masked = 0
    for tensor in by_hand.graph.initializer:
        if any(node.input[1] == tensor.name for node in convolutions):
            weight = numpy_helper.to_array(tensor)
            mask = np.ones(weight.size, bool)
            mask[np.argsort(np.abs(weight), axis=None, kind="stable")[: weight.size // 2]] = False
            tensor.CopyFrom(numpy_helper.from_array(weight * mask.reshape(weight.shape), tensor.name))
            masked += 1
    assert masked == len(tool.result.rows()) == 9  # of which several convolutions read one
    assert len(done.inlined) == len(convolutions) == 32
    hand = onnxruntime.InferenceSession(by_hand.SerializeToString(), session_options())
    for name, value, expected in zip(names, running, hand.run(None, {input_info.name: audio}), strict=True):
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)
        np.testing.assert_array_equal(expected, value, err_msg=name)
    assert np.abs(session.run(None, {input_info.name: audio})[0] - running[0]).max() > 0.05


class Counting(amanda.Tool):
    """Counts executions, which takes Python."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_after_op(self.count))

    def count(self, *values: Any) -> None:
        """One more."""


def test_faults_are_told_and_nothing_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotTraceableError, match=r"Counting\.count at .*\): it is not marked"):
        amanda.instrument(model, Counting(), out=tmp_path / "out.onnx")
    content = model.read_bytes()
    for name, part in (("empty.onnx", b""), ("half.onnx", content[: len(content) // 2]), ("no.onnx", b"no")):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(ArtefactError, match=rf"{name} is not a complete ONNX model"):
            amanda.instrument(tmp_path / name, Shifting(), out=tmp_path / "out.onnx")
    if (tmp_path / "model.data").exists():
        (tmp_path / "model.data").unlink()
        with pytest.raises(ArtefactError, match=r"model\.data cannot be read"):
            amanda.instrument(model, Shifting(), out=tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("where", ["absolute", "above", "through a folder", "a link", "a pipe", "a folder"])
def test_external_data_outside_of_the_folder_of_a_model_are_not_read(where: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "key.bin", tmp_path / "download"
    folder.mkdir()
    secret.write_bytes(WEIGHT.tobytes())
    (folder / "link").symlink_to(secret)
    (folder / "inner").mkdir()
    os.mkfifo(folder / "pipe")
    weight = TensorProto(name="w", data_type=1, dims=WEIGHT.shape, data_location=TensorProto.EXTERNAL)
    location = {
        "absolute": str(secret), "above": "../key.bin", "through a folder": "inner/../../key.bin",
        "a link": "link", "a pipe": "pipe", "a folder": "inner",
    }[where]  # fmt: skip
    weight.external_data.add(key="location", value=location)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", 1, [2, 64])], [helper.make_tensor_value_info("y", 1, [2, 64])],
        [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    why = "no regular file" if where in ("a pipe", "a folder") else "outside of its folder"
    with pytest.raises(ArtefactError, match=why):
        amanda.instrument(folder / "model.onnx", PruneTool(), out=folder / "out.onnx")
    with pytest.raises(ArtefactError, match=why):
        instrument(folder / "model.onnx", PruneTool())
    with pytest.raises(QuantizeError, match=why):
        convert(folder / "model.onnx", QuantizeTool(), folder / "out.onnx")
    with pytest.raises(PruneError, match=why):
        ChannelPruneTool().prepare(folder / "model.onnx", X)
    assert not (folder / "out.onnx").exists()

"""SavedModels with routines written into them, which TensorFlow alone loads and runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from unfused import unfused

import amanda
from amanda.errors import ArtefactError, NotTraceableError
from amanda.tools.prune import PruneTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what an old SavedModel makes TensorFlow warn of

Index = tf.lookup.TextFileIndex
Outputs = dict[str, NDArray[Any]]

ALONE = """
import sys
sys.modules["amanda"] = None
import numpy as np, tensorflow as tf
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
folder, given, out = sys.argv[1:]
x = tf.constant(np.load(given))
made = tf.saved_model.load(folder)
found = {f"signature {k}": v.numpy() for k, v in made.signatures["serving_default"](x).items()}
found |= {f"call {k}": v.numpy() for k, v in made(x).items()}
config = tf.compat.v1.ConfigProto()
config.graph_options.rewrite_options.disable_meta_optimizer = True
with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
    meta = tf.compat.v1.saved_model.load(session, ["serve"], folder)
    signature = meta.signature_def["serving_default"]
    (name,) = [one.name for one in signature.inputs.values()]
    wanted = {f"session {k}": one.name for k, one in signature.outputs.items()}
    found |= session.run(wanted, {name: np.load(given)})
np.savez(out, **found)
"""


def alone(folder: Path, example: NDArray[Any], tmp_path: Path) -> Outputs:
    """What a SavedModel gives in a process that has no Amanda: by signature, call, and in a session."""
    np.save(tmp_path / "given.npy", example)
    out = tmp_path / "out.npz"
    command = [sys.executable, "-c", ALONE, str(folder), str(tmp_path / "given.npy"), str(out)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)


@pytest.fixture(autouse=True)
def _without_fusion() -> Any:
    with unfused():
        yield


def basic_pitch() -> Path:
    package = importlib.util.find_spec("basic_pitch")
    assert package is not None
    (folder,) = package.submodule_search_locations or ()
    return Path(folder, "saved_models", "icassp_2022", "nmp")


@pytest.mark.long
def test_a_pruned_copy_of_basic_pitch_gives_what_the_tool_gives_when_it_runs(tmp_path: Path) -> None:
    time = np.arange(43844) / 22050
    audio = (np.sin(2764 * time) + np.sin(4140 * time)).astype(np.float32)[None, :, None]
    done = amanda.instrument(basic_pitch(), PruneTool(), out=tmp_path / "pruned")
    outputs = alone(tmp_path / "pruned", audio, tmp_path)
    model = tf.saved_model.load(str(basic_pitch()))
    bare = model.signatures["serving_default"](tf.constant(audio))
    tool = PruneTool()
    with amanda.apply(tool):
        running = model.signatures["serving_default"](tf.constant(audio))
    assert len(tool.result.rows()) == 32
    for name, value in running.items():
        for way in ("signature", "call"):
            np.testing.assert_array_equal(outputs[f"{way} {name}"], value, err_msg=f"{way} {name}")
        # A session folds what is constant, with or without an optimizer of graphs.
        np.testing.assert_allclose(outputs[f"session {name}"], value, atol=1e-5)
        assert np.abs(value - bare[name]).max() > 0.05
    assert done.analysed > 600
    assert {item.type for item in done.inlined} == {"conv2d"}
    (about,) = json.loads((tmp_path / "pruned/assets.extra/amanda.json").read_text())
    assert about["tools"] == ["amanda.tools.prune._tool.PruneTool"]
    names = [item.name for item in model.variables]
    assert [item.name for item in tf.saved_model.load(str(tmp_path / "pruned")).variables] == names


class Small(tf.Module):
    """A table from an asset, a loop, a branch, and a function that calls another."""

    def __init__(self, asset: str) -> None:
        super().__init__()
        self.weight = tf.Variable(np.arange(16, dtype=np.float32).reshape(4, 4) / 8 - 1)
        initializer = tf.lookup.TextFileInitializer(
            asset,
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )
        self.table = tf.lookup.StaticHashTable(initializer, -1)

    @tf.function
    def product(self, x: Any) -> Any:
        return tf.matmul(x, self.weight)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])
    def __call__(self, x: Any) -> Any:
        for _ in tf.range(2):
            x = self.product(x)
        x = tf.matmul(x, self.weight) if tf.reduce_sum(x) > 0 else tf.matmul(-x, self.weight)
        return {"y": tf.nn.relu(x)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def look_up(self, words: Any) -> Any:
        return {"ids": self.table.lookup(words)}

    @tf.function(input_signature=[tf.TensorSpec([4, 4], tf.float32)], jit_compile=True)
    def compiled(self, x: Any) -> Any:
        return {"y": tf.matmul(x, self.weight)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "words.txt").write_text("one\ntwo\n")
    model = Small(str(folder / "words.txt"))
    signatures = {"serving_default": model.__call__, "look_up": model.look_up, "compiled": model.compiled}
    tf.saved_model.save(model, str(folder / "model"), signatures)
    return folder / "model"


class Halving(amanda.Tool):
    """Halves what products read of the weight, and adds one to what relu gives."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "MatMul":
            context.insert_before_op(self.halve, inputs=[1])
        elif context.get_op_type() == "Relu":
            context.insert_after_op(self.increment)

    @amanda.traceable
    def halve(self, weight: Any) -> Any:
        return weight / 2

    @amanda.traceable
    def increment(self, y: Any) -> Any:
        return y + 1


@pytest.mark.long
def test_loops_branches_tables_and_compiled_functions_stay(small: Path, tmp_path: Path) -> None:
    done = amanda.instrument(small, Halving(), out=tmp_path / "halved")
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    outputs = alone(tmp_path / "halved", x, tmp_path)
    model = tf.saved_model.load(str(small))
    weight = model.weight.numpy() / 2
    y = x @ weight @ weight
    expected = np.maximum((y if y.sum() > 0 else -y) @ weight, 0) + 1
    for way in ("signature", "call", "session"):
        np.testing.assert_allclose(outputs[f"{way} y"], expected, rtol=1e-5)
    loaded_copy = tf.saved_model.load(str(tmp_path / "halved"))
    assert loaded_copy.signatures["look_up"](tf.constant(["two", "three"]))["ids"].numpy().tolist() == [1, -1]
    square = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(loaded_copy.signatures["compiled"](tf.constant(square))["y"], weight)
    np.testing.assert_array_equal(loaded_copy.weight, model.weight)
    assert (tmp_path / "halved/assets/words.txt").read_text() == "one\ntwo\n"
    assert {entry.action for entry in done.inlined} == {"insert_before_op", "insert_after_op"}
    prints = [
        tf.saved_model.experimental.read_fingerprint(str(path)) for path in (small, tmp_path / "halved")
    ]
    assert prints[0].saved_model_checksum != prints[1].saved_model_checksum
    assert prints[0].signature_def_hash == prints[1].signature_def_hash


@pytest.mark.slow
def test_a_copy_is_differentiated_and_instrumented_again(small: Path, tmp_path: Path) -> None:
    amanda.instrument(small, Halving(), out=tmp_path / "once")
    amanda.instrument(tmp_path / "once", Halving(), out=tmp_path / "twice")
    assert len(json.loads((tmp_path / "twice/assets.extra/amanda.json").read_text())) == 2
    model, loaded_copy = (tf.saved_model.load(str(folder)) for folder in (small, tmp_path / "twice"))
    x = tf.eye(4)
    np.testing.assert_array_equal(loaded_copy.compiled(x)["y"], model.weight / 4)
    with tf.GradientTape() as tape:
        y = loaded_copy.product(x)
    np.testing.assert_array_equal(tape.gradient(y, loaded_copy.weight), np.full((4, 4), 0.25, np.float32))


class Replacing(amanda.Tool):
    """Computes relu as something else."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "Relu":
            context.replace_op(self.replacement)

    @amanda.traceable
    def replacement(self, x: Any, original: Any) -> Any:
        return original(x) + tf.nn.sigmoid(x)


def test_a_replacement_is_in_the_copy(small: Path, tmp_path: Path) -> None:
    amanda.instrument(small, Replacing(), out=tmp_path / "replaced")
    x = tf.constant(np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4))
    model, loaded_copy = (tf.saved_model.load(str(folder)) for folder in (small, tmp_path / "replaced"))
    with amanda.apply(Replacing()):
        running = model(x)["y"]
    np.testing.assert_array_equal(loaded_copy(x)["y"], running)
    assert np.abs(running - model(x)["y"]).max() > 0.1


class Reading(amanda.Tool):
    """A traceable routine that cannot be traced."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "Relu":
            context.insert_after_op(self.read)

    @amanda.traceable
    def read(self, y: Any) -> Any:
        return y * float(y.numpy().mean())


def test_a_routine_that_cannot_be_traced_is_told(small: Path, tmp_path: Path) -> None:
    with pytest.raises(NotTraceableError, match=r"Reading\.read at .*\): it cannot be traced"):
        amanda.instrument(small, Reading(), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["empty", "truncated", "no variables", "TensorFlow 1"])
def test_folders_that_hold_no_whole_saved_model_are_refused(small: Path, tmp_path: Path, fault: str) -> None:
    model = tmp_path / "model"
    if fault == "TensorFlow 1":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32)
            tf.compat.v1.saved_model.simple_save(session, str(model), {"x": x}, {"y": x + 1})
    else:
        model.mkdir()
        content = (small / "saved_model.pb").read_bytes()
        length = {"empty": 0, "truncated": len(content) // 2}.get(fault, len(content))
        (model / "saved_model.pb").write_bytes(content[:length])
    message = {
        "empty": "is of TensorFlow 1|is no SavedModel", "truncated": "is no SavedModel that can be read",
        "no variables": "cannot be loaded by TensorFlow", "TensorFlow 1": "tf.saved_model.save",
    }[fault]  # fmt: skip
    with pytest.raises(ArtefactError, match=message):
        amanda.instrument(model, Halving(), out=tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("where", ["a link", "a folder", "a pipe"])
def test_parts_outside_of_a_saved_model_are_not_copied(small: Path, tmp_path: Path, where: str) -> None:
    model, secret = Path(shutil.copytree(small, tmp_path / "model")), tmp_path / "private"
    assets = model / "assets.extra"
    secret.mkdir()
    (secret / "key").write_text("secret")
    assets.mkdir(exist_ok=True)
    if where == "a pipe":
        os.mkfifo(assets / "part")
    else:
        (assets / "part").symlink_to(secret / "key" if where == "a link" else secret)
    why = "no regular file" if where == "a pipe" else "outside of its folder"
    with pytest.raises(ArtefactError, match=why):
        amanda.instrument(model, PruneTool(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (assets / "part").unlink()
    (assets / "part").symlink_to("../saved_model.pb")
    amanda.instrument(model, PruneTool(), out=tmp_path / "out")

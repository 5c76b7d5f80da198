"""Tools written into SavedModels: quantisation with scales of a calibration, and folded normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from unfused import unfused

import amanda
from amanda.tools.quantize import QuantizeTool
from amanda.tools.rewrite import RewriteTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what loading makes TensorFlow warn of

X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(2, 4, 4, 3)


class Network(tf.Module):
    """A convolution, its normalisation, and a product."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(0)
        self.kernel = tf.Variable(numbers.normal(size=(3, 3, 3, 4)).astype(np.float32))
        self.statistics = [tf.Variable(numbers.uniform(1, 2, 4).astype(np.float32)) for _ in range(4)]
        self.head = tf.Variable(numbers.normal(size=(64, 2)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec([2, 4, 4, 3], tf.float32)])
    def __call__(self, x: Any) -> Any:
        x = tf.nn.conv2d(x, self.kernel, 1, "SAME")
        x, *_ = tf.compat.v1.nn.fused_batch_norm(x, *self.statistics, is_training=False)
        return tf.matmul(tf.reshape(tf.nn.relu(x), (2, 64)), self.head)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tf.saved_model.save(Network(), str(folder))
    return folder


@pytest.fixture(autouse=True)
def _without_fusion() -> Any:
    with unfused():
        yield


def test_a_saved_model_is_quantised_as_it_is_when_it_runs(saved: Path, tmp_path: Path) -> None:
    model, tool = tf.saved_model.load(str(saved)), QuantizeTool()
    bare = model(X)
    with amanda.apply(tool):
        with tool.calibrating():
            model(X)
        running = model(X)
    tool.save(tmp_path / "scales.json")
    again = QuantizeTool()
    again.load(tmp_path / "scales.json")
    amanda.instrument(saved, again, out=tmp_path / "quantised")
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path / "quantised"))(X), running)
    assert not np.array_equal(running, bare)


def test_normalisation_is_folded_into_convolutions(saved: Path, tmp_path: Path) -> None:
    done = amanda.instrument(saved, RewriteTool("fold_batch_norm"), out=tmp_path / "folded")
    made, model = tf.saved_model.load(str(tmp_path / "folded")), tf.saved_model.load(str(saved))
    np.testing.assert_allclose(made(X), model(X), rtol=1e-4, atol=1e-5)
    assert {(one.type, one.action) for one in done.inlined} == {("batch_norm", "replace_op")}
    (path,) = (tmp_path / "folded").glob("saved_model.pb")
    file = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    functions = file.meta_graphs[0].graph_def.library.function
    kinds = {node.op for one in functions if "amanda" in one.signature.name for node in one.node_def}
    assert "Conv2D" in kinds
    assert "FusedBatchNormV3" not in kinds

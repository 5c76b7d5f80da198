"""Dumps of TensorFlow: the same entries in eager mode, in functions and in sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.dump import Dump, DumpTool


def dumped(folder: Path, program: Any, **options: Any) -> Dump:
    tool = DumpTool(folder, outputs="full", weights="full", gradients="full", **options)
    with amanda.apply(tool):
        program()
    assert tool.result
    return Dump(folder)


def arrays(dump: Dump, kind: str, role: str) -> list[Any]:
    return [dump.array(entry) for entry in dump if (dump.ops[entry.op].type, entry.role) == (kind, role)]


@pytest.mark.parametrize("eagerly", [True, False])
def test_training_is_dumped_eagerly_and_in_a_function(tmp_path: Path, eagerly: bool) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((6, 6, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    images = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(images)))
    expected = tape.gradient(loss, model.layers[0].kernel).numpy()
    kernel = model.layers[0].kernel.numpy()
    model.compile("sgd", "mse", run_eagerly=eagerly)
    dump = dumped(tmp_path / "dump", lambda: model.fit(images, np.zeros((2, 2), np.float32), verbose=0))
    np.testing.assert_array_equal(arrays(dump, "conv2d", "weight")[0], kernel)
    (gradient,) = arrays(dump, "conv2d_backward", "weight gradient")
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    (op,) = {op for op in dump.ops if op.type == "conv2d"}
    assert (op.layout, op.weight_layout) == ("NHWC", "HWIO")


def test_a_session_and_types_that_numpy_lacks_are_dumped(tmp_path: Path) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        data = v1.placeholder(tf.float32, (None, 3))
        result = tf.cast(tf.nn.relu(data - 2.0), tf.bfloat16)
    with v1.Session(graph=graph) as session:
        dump = dumped(tmp_path / "dump", lambda: session.run(result, {data: np.full((2, 3), 5.0)}))
    np.testing.assert_array_equal(arrays(dump, "relu", "output")[0], np.full((2, 3), 3.0))
    cast = arrays(dump, "to", "output")[0]
    assert cast.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # native code reads the first one
def test_summaries_of_a_graph_do_not_depend_on_who_measures(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = tf.Variable(tf.random.stateless_normal([4, 4], [1, 2]))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            first, second = tf.split(tf.cast(tf.nn.relu(x @ weight), dtype), 2, axis=-1)
            loss = tf.reduce_sum(tf.cast(first * second, tf.float32))
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return loss, tf.shape(x)

    def entries(folder: str) -> list[Any]:
        weight.assign(tf.random.stateless_normal([4, 4], [1, 2]))
        tool = DumpTool(tmp_path / folder, inputs="summary", executions=None)
        with amanda.apply(tool):
            for number in (3, 40, 1, 0, 3):
                step(tf.random.stateless_normal([number, 4], [number, 0]))
                tool.add_returned(tf.constant([number]))  # which stands between the entries of two steps
                assert len(Dump(tool.result.folder)) == len(tool.result.entries)
        return tool.result.entries

    native = entries("native")
    assert [entry.shape for entry in native if entry.role == "weight gradient"] == [(4, 4)] * 5
    monkeypatch.setattr("amanda.interceptor.NATIVE", False)
    assert entries("python") == native

"""The profile of TensorFlow: eager mode, functions, sessions and Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.profile import ProfileResult, ProfileTool

v1 = tf.compat.v1


def calls(result: ProfileResult, kind: str, phase: str | None = None) -> int:
    return sum(one.calls for one in result.ops if one.type == kind and phase in (None, one.phase))


def allocated(result: ProfileResult, kind: str) -> int:
    return sum(one.allocated or 0 for one in result.ops if one.type == kind)


def check_times(result: ProfileResult) -> None:
    assert all(0 < one.least <= one.most <= one.total for one in result.ops if one.timed)
    assert result.total() > 0 < result.wall


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_training_step_is_measured(mode: str) -> None:
    weight = tf.Variable(tf.ones((8, 16)))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(x @ weight))
        return tape.gradient(loss, weight)

    run = tf.function(step) if mode == "function" else step
    tool, x = ProfileTool(), tf.ones((4, 8))
    vanilla = run(x)
    with amanda.apply(tool):
        for _ in range(3):
            gradient = run(x)
    assert np.array_equal(vanilla, gradient)
    result = tool.result
    assert calls(result, "matmul") == calls(result, "relu") == calls(result, "relu_backward") == 3
    assert calls(result, "matmul_backward") == 3
    assert allocated(result, "matmul") == allocated(result, "relu") == 3 * 4 * 16 * 4
    assert allocated(result, "ReadVariableOp") == 0
    assert [step.number for step in result.timeline.steps] == [0, 1, 2]
    check_times(result)
    if mode == "eager":
        assert result.total() <= result.wall


def test_runs_of_a_session_are_steps() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (None, 8))
        weight = v1.get_variable("weight", (8, 16))
        loss = tf.reduce_sum(tf.nn.relu(tf.matmul(x, weight)))
        (gradient,) = v1.gradients(loss, weight)
        tool = ProfileTool(wait=1, active=2, repeat=1)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            with amanda.apply(tool):
                for _ in range(5):
                    session.run(gradient, {x: np.ones((4, 8))})
    result = tool.result
    assert [step.number for step in result.timeline.steps] == [1, 2]
    assert calls(result, "matmul", "forward") == calls(result, "matmul_backward") == 2
    assert allocated(result, "matmul") == 2 * 4 * 16 * 4
    check_times(result)


def test_an_op_that_reads_a_tensor_of_unknown_rank_has_a_time() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32)
        y = tf.nn.relu(x)
        tool = ProfileTool()
        with v1.Session() as session, amanda.apply(tool):
            session.run(y, {x: np.ones((4, 8))})
    (relu,) = (op for op in tool.result.ops if op.type == "relu")
    assert relu.calls == relu.timed == 1


def test_a_slow_op_of_a_graph_is_what_takes_long() -> None:
    with tf.Graph().as_default():
        x = tf.ones((600, 600))
        y = tf.linalg.matmul(x, x)
        for _ in range(5):
            y = tf.linalg.matmul(y, x) / 600
        tool = ProfileTool(warmup=1)
        with (
            v1.Session(config=v1.ConfigProto(graph_options=v1.GraphOptions())) as session,
            amanda.apply(tool),
        ):
            for _ in range(4):
                session.run(y)
    rows = tool.result.by("type").rows()
    assert rows[0][0] == "matmul"


def test_each_time_round_a_loop_is_an_execution() -> None:
    @tf.function
    def looped(x: Any) -> Any:
        for _ in tf.range(7):
            x = tf.tanh(x)
        return x

    tool = ProfileTool()
    with amanda.apply(tool):
        looped(tf.ones(3))
    result = tool.result
    assert calls(result, "tanh") == 7
    (loop,) = [one for one in result.ops if one.type in ("While", "StatelessWhile")]
    assert loop.own == 0
    assert loop.total >= max(one.total for one in result.ops if one.type == "tanh")


def test_keras_fit_is_measured_step_by_step() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((32, 8), "float32"), np.zeros(32, "int64")
    tool = ProfileTool()
    with amanda.apply(tool):
        model.fit(x, y, batch_size=8, verbose=0)
    result = tool.result
    dense = [one for one in result.ops if one.type == "matmul"]
    assert len(dense) == 2
    assert [one.calls for one in dense] == [4, 4]
    assert {one.module for one in dense} == {layer.name for layer in model.layers}
    assert calls(result, "matmul_backward") == 4 * 3
    modules = {row[0]: row for row in result.tree(9).rows()}
    assert all(modules[one.module][3] >= one.own / 1e6 for one in dense)
    check_times(result)

"""Coverage on TensorFlow: Keras' layers in eager mode, name scopes in graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amanda
from amanda.tools.coverage import CoverageResult, CoverageTool


def covered(program: Any) -> CoverageResult:
    tool = CoverageTool()
    with amanda.apply(tool):
        program()
    return tool.result


def counts(result: CoverageResult, phase: str) -> dict[str, tuple[int, ...]]:
    return {row[1]: tuple(row[2:6]) for row in result.by("phase", "type").rows() if row[0] == phase}


def make() -> keras.Model:
    return keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.ReLU(), keras.layers.Dense(3, activation="relu")]
    )


def test_layers_of_one_op_are_seen_whole_and_of_several_the_ends() -> None:
    model, x = make(), tf.ones((2, 4))
    result = covered(lambda: [tf.exp(model(x)) for _ in range(2)])
    counted = counts(result, "forward")
    assert counted["relu"] == (4, 2, 2, 4)
    assert counted["exp"] == (2, 0, 0, 0)
    assert counted["BiasAdd"] == (2, 0, 0, 0)
    assert {place.model for place in result.ops} == {"Sequential", ""}


def test_their_backward_ops_are_told_too() -> None:
    model, x = make(), tf.Variable(tf.ones((2, 4)))

    def program() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        tape.gradient(loss, [x, *model.trainable_variables])

    counted = counts(covered(program), "backward")
    assert counted["relu_backward"][:2] == (2, 1)
    assert sum(row[0] for row in counted.values()) > 4


def test_in_a_graph_name_scopes_stand_for_layers() -> None:
    with tf.Graph().as_default() as graph:
        data = tf.compat.v1.placeholder(tf.float32, (2, 4))
        with tf.name_scope("one"):
            y = tf.nn.relu(data)
        with tf.name_scope("outer"):
            with tf.name_scope("two"):
                y = tf.exp(tf.sin(tf.cos(y)))
            y = tf.tanh(y)

    def program() -> None:
        with tf.compat.v1.Session(graph=graph) as session:
            for _ in range(2):
                session.run(y, {data: np.ones((2, 4), np.float32)})

    counted = counts(covered(program), "forward")
    assert counted["relu"] == (2, 2, 2, 2)
    assert counted["cos"] == (2, 0, 2, 0)
    assert counted["sin"] == (2, 0, 0, 0)
    assert counted["exp"] == (2, 0, 0, 2)
    assert counted["tanh"] == (2, 0, 0, 0)

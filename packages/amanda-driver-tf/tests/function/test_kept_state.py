"""What a tool keeps at an op is there in every graph that has the op."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda


class Keeping(amanda.Tool):
    def __init__(self) -> None:
        self.count = 0
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "MatMul":
            self.keep(context, "number", self.make)

    def make(self) -> int:
        self.count += 1
        return self.count


def dense(name: str = "model") -> keras.Model:
    layers = [
        keras.layers.Input((4,)),
        keras.layers.Dense(3, name="first"),
        keras.layers.Dense(2, name="last"),
    ]
    return keras.Sequential(layers, name=name)


@pytest.fixture
def x() -> np.ndarray:
    return np.ones((2, 4), np.float32)


def test_training_prediction_and_a_function_share_the_state_of_a_layer(x) -> None:
    model, tool = dense(), Keeping()
    model.compile("sgd", "mse")
    with amanda.apply(tool):
        model.fit(x, np.zeros((2, 2)), verbose=0)
        model.predict_on_batch(x)
        model.compile("adam", "mse")
        model.fit(x, np.zeros((2, 2)), verbose=0)
        tf.function(model, autograph=False)(x)
    assert tool.count == 2


def test_models_of_the_same_names_have_state_of_their_own(x) -> None:
    tool = Keeping()
    with amanda.apply(tool):
        for model in (dense(), dense()):
            tf.function(model, autograph=False)(x)
            model.predict_on_batch(x)
    assert tool.count == 4


def test_a_layer_that_is_called_twice_in_a_graph_has_state_for_each_call(x) -> None:
    weight, tool = tf.Variable(tf.eye(4)), Keeping()

    def called(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(""):
            return tf.matmul(tf.matmul(x, weight), weight)

    with amanda.apply(tool):
        for _ in range(2):
            tf.function(called)(x)
    assert sorted(tool.state_dict().values()) == [1, 2]

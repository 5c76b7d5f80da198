"""The module of an op is the layer of Keras that calls it, in every mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import children
import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda


class Scopes(amanda.Tool):
    """The paths of the layers that ops lie in, by the op's type."""

    def __init__(self) -> None:
        self.forward: dict[str, list[tuple[str, ...]]] = {}
        self.backward: list[tuple[str, ...]] = []
        self.add_inst_for_op(self.see)
        self.add_inst_for_op(self.see_backward, backward=True)

    def see(self, context: amanda.OpContext) -> None:
        self.forward.setdefault(context.get_op().type, []).append(context.get_scopes())

    def see_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "MatMul" and context.get_op().type == "MatMul":
            self.backward.append(context.get_scopes())

    def of(self, program: Callable[[], Any]) -> dict[str, list[tuple[str, ...]]]:
        with amanda.apply(self):
            program()
        scopes = {kind: self.forward.get(kind, []) for kind in ("MatMul", "Relu")}
        return {**scopes, "backward": self.backward}


class Twice(keras.Model):
    """Calls its first layer twice, so that the scope of the second call is named like the second layer."""

    def __init__(self) -> None:
        super().__init__(name="twice")
        self.first = keras.layers.Dense(3, name="dense")
        self.others = [keras.layers.Dense(3, name="dense_1")]
        self.act = keras.layers.ReLU(name="re_lu")

    def call(self, x: Any) -> Any:
        with tf.name_scope("mine"):
            return tf.nn.relu(self.others[0](self.act(self.first(self.first(x)))))


def nested() -> Any:
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.layers.Dense(3, name="one"), Called(name="called")], name="inner")
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(inner(inputs)), name="outer")


class Called(keras.layers.Layer):
    """Has a function of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.dense = keras.layers.Dense(3, name="deep")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    @tf.function
    def call(self, x: Any) -> Any:
        return tf.nn.relu(self.dense(x))


def recurrent() -> Any:
    layers = [
        keras.layers.Reshape((3, 1)),
        keras.layers.LSTM(3, name="lstm"),
        keras.layers.Dense(3, name="end"),
    ]
    return keras.Sequential(layers, name="recurrent")


MODELS: dict[Any, dict[str, set[tuple[str, ...]]]] = {
    Twice: {
        "MatMul": {("first", "twice/dense", "dense"), ("others.0", "twice/dense_1", "dense_1")},
        "Relu": {("act", "twice/re_lu", "re_lu"), ("", "twice")},
    },
    nested: {
        "MatMul": {
            ("inner.one", "outer/inner/one", "inner/one", "one"),
            ("inner.called.dense", "outer/inner/called/deep", "inner/called/deep", "called/deep", "deep"),
            ("last", "outer/last"),
        },
        "Relu": {("inner.called", "outer/inner/called", "inner/called", "called")},
    },
    recurrent: {
        "MatMul": {
            ("lstm.cell", "recurrent/lstm/lstm_cell", "lstm/lstm_cell", "lstm_cell"),
            ("end", "recurrent/end"),
        },
        "Relu": set(),
    },
}


def model_of(make: Any) -> Any:
    model = make()
    model(np.ones((2, 3), np.float32))
    model.compile("sgd", "mse")
    return model


def eagerly(model: Any) -> None:
    with tf.GradientTape() as tape:
        value = model(tf.ones((2, 3)))
    tape.gradient(value, model.trainable_variables)


def in_a_function(model: Any) -> None:
    with tf.GradientTape() as tape:
        value = tf.function(lambda x: model(x))(tf.ones((2, 3)))
    tape.gradient(value, model.trainable_variables)


def in_fit(model: Any) -> None:
    model.fit(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), verbose=0)


@pytest.mark.parametrize("run", [eagerly, in_a_function, in_fit])
@pytest.mark.parametrize("before", [True, False], ids=["run before", "not run before"])
@pytest.mark.parametrize("make", MODELS)
def test_an_op_lies_in_its_layer(make: Any, run: Any, before: bool) -> None:
    model = model_of(make)
    if before:
        run(model)
    scopes = Scopes().of(lambda: run(model))
    expected = MODELS[make]
    assert set(scopes["MatMul"]) == expected["MatMul"]
    assert set(scopes["Relu"]) == expected["Relu"]
    assert set(scopes["backward"]) <= expected["MatMul"]
    assert scopes["backward"]


def test_layers_of_one_name_are_told_apart_by_their_variables() -> None:
    class Other(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twice")
            self.only = keras.layers.Dense(3, name="dense")

        def call(self, x: Any) -> Any:
            return self.only(x)

    models = [model_of(Other), model_of(Twice), model_of(Other), model_of(Twice)]
    for model in models:
        scopes = Scopes().of(lambda: tf.function(lambda x: model(x))(tf.ones((2, 3))))  # noqa: B023
        path = "only" if type(model) is Other else "first"
        assert scopes["MatMul"][0] == (path, "twice/dense", "dense")


def test_a_session_tells_the_layers_of_its_graph() -> None:
    with tf.Graph().as_default() as graph:
        model = Twice()
        y = model(tf.compat.v1.placeholder(tf.float32, (2, 3), name="x"))
        initialized = tf.compat.v1.global_variables_initializer()
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(initialized)
        scopes = Scopes().of(lambda: session.run(y, {"x:0": np.ones((2, 3))}))
    assert set(scopes["MatMul"]) == MODELS[Twice]["MatMul"]


def test_variables_of_a_loaded_model_name_its_layers(tmp_path: Any) -> None:
    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(3, name="dense"),
        keras.layers.Dense(3, name="dense_1"),
    ]
    keras.Sequential(layers, name="whole").export(str(tmp_path), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path))
    del layers
    scopes = Scopes().of(lambda: loaded.serve(tf.ones((2, 3))))
    assert scopes["MatMul"] == [("dense", "whole/dense"), ("dense_1", "whole/dense_1")]


def test_an_op_outside_of_layers_lies_in_its_name_scope() -> None:
    model_of(Twice)

    @tf.function
    def program(x: Any) -> Any:
        with tf.name_scope("dense_1"):
            return tf.nn.relu(x)

    assert Scopes().of(lambda: program(tf.ones(3)))["Relu"] == [("dense_1",)]


def test_what_a_function_of_tensorflow_reads_lies_where_the_function_is_called() -> None:
    scopes: set[str] = set()
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: scopes.add(context.get_scopes()[0]))
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(layer.trainable_variables)
    step = tf.Variable(1.0)

    @tf.function
    def program(x: Any) -> Any:
        with tf.name_scope("mine"):
            y = tf.cast(step, tf.float32) * tf.reduce_mean(x)  # both open scopes of their own
        optimizer.apply([tf.ones((3, 2)), tf.ones(2)])
        return y + step

    with amanda.apply(tool):
        program(tf.ones(3))
    assert scopes == {"", "mine", optimizer.name}


TF_KERAS = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import amanda, numpy as np, tensorflow as tf, tf_keras as keras
class Twice(keras.Model):
    def __init__(self):
        super().__init__(name="twice")
        self.first = keras.layers.Dense(3, name="dense")
        self.other = keras.layers.Dense(3, name="dense_1")
    def call(self, x):
        return self.other(self.first(self.first(x)))
model, x = Twice(), np.ones((2, 3), np.float32)
model.compile("sgd", "mse")
model.fit(x, x, verbose=0)
scopes = []
def see(context):
    if context.get_op().type == "MatMul":
        scopes.append(context.get_scopes()[:2])
tool = amanda.Tool()
tool.add_inst_for_op(see)
for run in (lambda: model(x), lambda: model.fit(x, x, verbose=0)):
    with amanda.apply(tool):
        run()
    print(sorted(set(scopes)))
    scopes.clear()
"""


@pytest.mark.slow
def test_tf_keras_tells_its_layers_too() -> None:
    done = children.run([sys.executable, "-c", TF_KERAS])
    expected = "[('first', 'twice/dense'), ('other', 'twice/dense_1')]"
    assert done.stdout.splitlines() == [expected, expected], done.stderr

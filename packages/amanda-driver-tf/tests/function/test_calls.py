"""Functions within functions, Keras, loaded models: what runs is seen, as often as it runs."""

from __future__ import annotations

import importlib
import threading
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow import FunctionDriver


class Counting(amanda.Tool):
    """Counts executions by type, and by forward and backward type."""

    def __init__(self) -> None:
        self.analysed: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context) -> None:
        kind = context.get_op().type
        self.analysed[kind] += 1
        context.insert_before_op(lambda *_: self.ran.update([kind]))

    def backward(self, context) -> None:
        kind = f"{context.get_op().type}>{context.get_backward_op().type}"
        self.analysed[kind] += 1
        context.insert_before_backward_op(lambda *_: self.ran.update([kind]))


@pytest.fixture
def counting() -> Counting:
    return Counting()


@tf.function
def inner(x):
    return tf.nn.relu(x) * 1.5


@tf.function
def nested(x):
    y = inner(x)
    if tf.reduce_sum(y) > 0:
        y = tf.sin(y)
    else:
        y = tf.cos(y)
    i = 0
    while i < tf.constant(3):
        y = tf.tanh(y)
        i += 1
    return tf.switch_case(tf.constant(1), [lambda: tf.exp(y), lambda: tf.sinh(y)])


def test_called_functions_branches_and_loops_are_entered(counting) -> None:
    x = tf.constant([1.0, 2.0])
    vanilla = nested(x)
    with amanda.apply(counting) as scope:
        result = nested(x)
    np.testing.assert_allclose(result, vanilla, rtol=1e-6)
    ran = [counting.ran[kind] for kind in ("Relu", "Sin", "Cos", "Tanh", "Sinh", "Exp")]
    assert ran == [1, 1, 0, 3, 1, 0]
    assert counting.analysed["Cos"] == counting.analysed["Tanh"] == 1
    assert not scope.report


@pytest.mark.parametrize("outside", [True, False])
def test_gradients_of_branches_and_loops_belong_to_their_ops(counting, outside) -> None:
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def loop(x):
        for _ in tf.range(3):
            x = tf.tanh(x)
        return tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: tf.cos(x))

    def gradient():
        with tf.GradientTape() as tape:
            y = loop(x)
        return tape.gradient(y, x)

    compute = gradient if outside else tf.function(gradient)
    vanilla = compute()
    with amanda.apply(counting):
        result = compute()
    np.testing.assert_allclose(result, vanilla, rtol=1e-6)
    assert counting.ran["Tanh>TanhGrad"] == 3
    assert counting.ran["Relu>ReluGrad"] == 1


def test_a_variable_made_in_the_first_call(counting) -> None:
    variables = []

    @tf.function
    def first(x):
        if not variables:
            variables.append(tf.Variable(2.0))
        return tf.sin(x * variables[0])

    with amanda.apply(counting):
        first(tf.constant(1.0))
        first(tf.constant(1.0))
    assert counting.ran["Sin"] == 2


def test_several_signatures_are_several_graphs(counting) -> None:
    f = tf.function(lambda x: tf.sin(x))
    with amanda.apply(counting):
        for x in (tf.constant(1.0), tf.constant([1.0]), tf.constant(1.0, tf.float64)):
            f(x)
    assert counting.ran["Sin"] == 3


def test_custom_gradients_are_as_they_are(counting) -> None:
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda g: tf.clip_by_value(g, -1.0, 1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(clipped(x) * 8.0)
        return tape.gradient(y, x)

    x = tf.constant([0.0, 1.0])
    vanilla = step(x)
    with amanda.apply(counting):
        np.testing.assert_allclose(step(x), vanilla, rtol=1e-6)
    assert counting.ran["Sin>Mul"] == 1


def test_compilation_is_left_out_and_said(counting) -> None:
    f = tf.function(lambda x: tf.sin(x), jit_compile=True)
    x = tf.constant(1.0)
    vanilla = f(x)
    with amanda.apply(counting) as scope:
        np.testing.assert_allclose(f(x), vanilla, rtol=1e-6)
        f(x)
    assert counting.ran["Sin"] == 2
    assert [entry.what.split()[0] for entry in scope.report] == ["jit_compile"]


def test_backward_ops_that_names_alone_tell_are_said(counting, layer) -> None:
    layer.step(layer.x)
    with amanda.apply(counting) as scope:
        layer.step(layer.x)
    assert counting.ran["Relu>ReluGrad"] == 1
    assert "names tell which forward ops" in str(scope.report)


def test_observers_are_packed_within_a_budget(layer, monkeypatch) -> None:
    """With no budget each has a call of its own, else they share one."""
    names: list[str] = []
    tool = amanda.Tool()

    def analysis(context) -> None:
        name = context.get_op().name
        context.insert_before_op(amanda.observer(lambda *_: names.append(name)))

    tool.add_inst_for_op(analysis)
    with amanda.apply(tool):
        layer.loss(layer.x)
        together = list(names)
    names.clear()
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 0)
    apart = tf.function(layer.loss.python_function)
    with amanda.apply(tool):
        apart(layer.x)
    assert sorted(names) == sorted(together)
    assert {"MatMul", "Relu"} < set(names)


def test_threads_share_one_copy(layer, counting) -> None:
    with amanda.apply(counting):
        threads = [threading.Thread(target=lambda: layer.loss(layer.x)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counting.analysed["Relu"] == 1
    assert counting.ran["Relu"] == 8


def test_nested_scopes_have_their_own_plans(layer) -> None:
    outer, inner = Counting(), Counting()
    with amanda.apply(outer):
        layer.loss(layer.x)
        with amanda.apply(inner):
            layer.loss(layer.x)
            with amanda.disabled():
                layer.loss(layer.x)
        layer.loss(layer.x)
    assert (outer.ran["Relu"], inner.ran["Relu"]) == (3, 1)
    assert (outer.analysed["Relu"], inner.analysed["Relu"]) == (1, 1)


def small_model(library="keras"):
    keras = importlib.import_module(library)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Conv2D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def batches():
    random = np.random.RandomState(0)
    return random.rand(32, 8, 8, 3).astype("f4"), random.rand(32, 2).astype("f4")


@pytest.mark.slow
@pytest.mark.parametrize("traced_before", [False, True])
def test_keras_trains_as_without_tools(counting, batches, traced_before) -> None:
    plain = small_model()
    plain.fit(*batches, batch_size=8, verbose=0, shuffle=False)
    model = small_model()
    if traced_before:
        weights = model.get_weights()
        model.fit(*batches, batch_size=8, verbose=0, shuffle=False)
        model.set_weights(weights)
        model.optimizer.iterations.assign(0)
    with amanda.apply(counting):
        model.fit(*batches, batch_size=8, verbose=0, shuffle=False)
        counts = dict(counting.ran)
        model.predict(batches[0], batch_size=32, verbose=0)
    model.evaluate(*batches, verbose=0)
    assert counts["Conv2D"] == counts["Conv2D>Conv2DBackpropFilter"] == 8
    assert counts["Conv2D>Conv2DBackpropInput"] == 4
    assert counting.ran["Conv2D"] == 10
    if not traced_before:
        for expected, weight in zip(plain.weights, model.weights, strict=True):
            np.testing.assert_allclose(expected, weight, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:non-integer arguments to randrange")  # tf_keras 2.16 gives such
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_both_kerases_fit_evaluate_and_predict_in_a_scope(counting, batches, library) -> None:
    def trained() -> list[np.ndarray]:
        model = small_model(library)
        history = model.fit(*batches, batch_size=8, epochs=2, verbose=0, shuffle=False)
        loss = model.evaluate(*batches, batch_size=8, verbose=0)
        predicted = model.predict(batches[0], batch_size=32, verbose=0)
        return [np.asarray(history.history["loss"]), np.asarray(loss), predicted, *model.get_weights()]

    plain = trained()
    with amanda.apply(counting):
        inside = trained()
    for expected, value in zip(plain, inside, strict=True):
        np.testing.assert_allclose(expected, value, atol=1e-6)
    assert counting.ran["Conv2D"] == 2 * (2 * 4 + 4 + 1)
    assert counting.ran["Conv2D>Conv2DBackpropFilter"] == 2 * 2 * 4


@pytest.mark.parametrize("loaded_in_scope", [False, True])
def test_a_loaded_model_is_instrumented(counting, tmp_path, loaded_in_scope) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            self.weight = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def __call__(self, x):
            return {"y": tf.nn.relu(inner(tf.matmul(x, self.weight)))}

    model = Model()
    tf.saved_model.save(model, str(tmp_path), signatures=model.__call__)
    x = tf.constant([[1.0, -1.0]])
    loaded = tf.saved_model.load(str(tmp_path))
    vanilla = loaded(x)["y"]
    with amanda.apply(counting):
        if loaded_in_scope:
            loaded = tf.saved_model.load(str(tmp_path))
            counting.ran.clear()
        output = loaded(x)["y"]
        served = loaded.signatures["serving_default"](x)["y"]
    np.testing.assert_array_equal(output, vanilla)
    np.testing.assert_array_equal(served, vanilla)
    assert counting.ran["MatMul"] == 2
    assert counting.ran["Relu"] == 4


@pytest.mark.parametrize("traced_before", [True, False])
def test_the_gradients_in_the_branches_of_a_condition_are_backward_ops(traced_before: bool) -> None:
    weight, ran = tf.Variable(2.0), []

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cond(x > 0, lambda: tf.nn.relu(x * weight), lambda: tf.nn.sigmoid(x * weight))
        return tape.gradient(y, weight)

    tool = amanda.Tool()

    def analysis(context) -> None:
        kind = context.get_backward_op().type
        context.insert_after_backward_op(lambda: ran.append(kind), grad_inputs=[])

    tool.add_inst_for_op(analysis, backward=True)
    if traced_before:
        step(tf.constant(1.0))
    with amanda.apply(tool):
        for x in (1.0, -1.0):
            step(tf.constant(x))
    assert [ran.count(kind) for kind in ("ReluGrad", "SigmoidGrad")] == [1, 1]

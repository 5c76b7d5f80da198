"""Architecture search in TensorFlow: eager mode, functions, sessions and Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.search import Choice, Random, Search, SearchError, SearchTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours

LAYERS = [
    Choice(["keep", "conv5", "conv3g2", "conv1"], type="conv2d"),
    Choice(["keep", "relu", "gelu"], type=["sigmoid", "relu"]),
    Choice(["keep", "bits4", "width0.5"], type="matmul"),
]


@pytest.fixture
def images() -> Any:
    return tf.constant(np.random.default_rng(0).random((2, 4, 4, 4)), tf.float32)


@pytest.fixture
def model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((4, 4, 4)),
            layers.Conv2D(4, 3, padding="same", activation="sigmoid", name="first"),
            layers.Conv2D(8, 3, padding="same"), layers.ReLU(), layers.Flatten(),
            layers.Dense(10, name="last"),
        ]
    )  # fmt: skip


def prepared(model: Any, x: Any, choices: Any = LAYERS, **options: Any) -> SearchTool:
    tool = SearchTool(choices, **options)
    tool.prepare(model, x)
    return tool


def test_clones_and_functions_compute_what_architectures_do(model: Any, images: Any) -> None:
    tool = prepared(model, images)
    function = tf.function(lambda x: model(x))
    numbers = np.random.default_rng(0)
    for _ in range(5):
        tool.architecture = architecture = Random().ask(tool.space, numbers)
        with amanda.apply(tool):
            expected, output = model(images), function(images)
        assert np.array_equal(output, expected), architecture
        clone = tool.finalize(model)
        assert np.array_equal(clone(images), expected), architecture
    assert len(tool.space) == 5


@pytest.mark.parametrize(
    "chosen",
    [
        {"first/Sigmoid": "relu"},
        {"first/Sigmoid": "skip"},
        {"last/MatMul": "bits4"},
        {"first/Conv2D": "conv5"},
    ],
)
def test_gradients_in_functions_are_those_of_eager_mode(model: Any, images: Any, chosen: Any) -> None:
    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        variables = [one.value for one in model.trainable_variables]
        return tape.gradient(loss, variables, unconnected_gradients="zero")

    activations = Choice(["keep", "relu", "skip"], type="sigmoid")
    tool = prepared(model, images, [LAYERS[0], activations, LAYERS[2]])
    tool.architecture = chosen
    with amanda.apply(tool):
        expected, function_gradients = gradients(images), tf.function(gradients)(images)
    assert all(np.array_equal(one, other) for one, other in zip(expected, function_gradients, strict=True))
    if "skip" not in chosen.values():
        clone = tool.finalize(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(clone(images) ** 2)
        own = tape.gradient(loss, [one.value for one in clone.trainable_variables])
        assert (
            all(np.array_equal(one, other) for one, other in zip(expected, own, strict=True) if np.any(one))
            or "bits4" in chosen.values()
        )


def test_flops_are_those_of_the_clone(model: Any, images: Any) -> None:
    tool = prepared(model, images, LAYERS[:1])
    tool.architecture = dict(zip(tool.space, ["conv5", "conv3g2"], strict=True))
    assert tool.flops() == prepared(tool.finalize(model), images, []).flops()


def test_gradients_of_a_mixture_are_those_of_one_by_hand(images: Any) -> None:
    keras.utils.set_random_seed(0)
    conv = keras.layers.Conv2D(4, 3, padding="same")
    model = keras.Sequential([keras.layers.Input((4, 4, 4)), conv, keras.layers.Activation("sigmoid")])
    tool = prepared(model, images, ["conv2d=keep|conv5|conv1", "sigmoid=keep|relu"], mixture=True)
    (wide, point), (first, second) = tool.weights(), tool.alphas()
    variables = [*(one.value for one in model.trainable_variables), wide, point, first, second]
    with amanda.apply(tool), tf.GradientTape() as tape:
        outputs = model(images)
        loss = tf.reduce_sum(outputs**2)
    found = tape.gradient(loss, variables)

    kernel, bias = (one.value for one in model.trainable_variables)
    with tf.GradientTape() as tape:
        shares = tf.nn.softmax(first)
        x = sum(
            share * one
            for share, one in zip(
                tf.unstack(shares),
                [tf.nn.conv2d(images, one, 1, "SAME") for one in (kernel, wide, point)],
                strict=True,
            )
        )
        x = tf.nn.bias_add(x, bias)
        shares = tf.nn.softmax(second)
        outputs_by_hand = shares[0] * tf.sigmoid(x) + shares[1] * tf.nn.relu(x)
        loss = tf.reduce_sum(outputs_by_hand**2)
    expected = tape.gradient(loss, [kernel, bias, wide, point, first, second])
    assert np.array_equal(outputs, outputs_by_hand)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_function_that_trains_says_that_candidates_do_not(model: Any, images: Any) -> None:
    tool = prepared(model, images)
    assert not any("train eagerly" in one for one in tool.result.remarks)
    with amanda.apply(tool):
        tf.function(lambda x: model(x))(images)
    assert "train eagerly" in tool.result.remarks[-1]


def test_a_choice_that_is_no_layer_is_an_error(images: Any) -> None:
    inputs = keras.Input((4, 4, 4))
    inner = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    model = keras.Model(inputs, keras.layers.Add()([inner, inputs]))
    tool = prepared(model, images, ["add=keep|skip"])
    (name,) = tool.space
    tool.architecture = {name: "skip"}
    with amanda.apply(tool), tf.GradientTape() as tape:
        tape.watch(images)
        outputs = model(images)
    assert np.array_equal(outputs, images)
    assert np.array_equal(tape.gradient(outputs, images), np.ones_like(images))
    with pytest.raises(
        SearchError, match=r"'skip' of .* is no module: add(_\d+)? is a Add; run the model in a scope"
    ):
        tool.finalize(model)


def test_a_search_in_a_session() -> None:
    numbers = np.random.default_rng(0)
    kernel = numbers.standard_normal((6, 3)).astype(np.float32)
    data = numbers.standard_normal((8, 6)).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (8, 6))
        weight = tf.compat.v1.get_variable("weight", initializer=kernel)
        y = tf.sigmoid(tf.matmul(x, weight))
        session.run(tf.compat.v1.global_variables_initializer())
        tool = SearchTool(["sigmoid=keep|relu|tanh", "matmul=keep|bits4|bits2"])
        tool.prepare(lambda: session.run(y, {x: data}))

        def evaluate() -> float:
            return float(session.run(y, {x: data}).sum())

        result = Search(tool, evaluate, "random", costs=["size"], progress=False).run(trials=20)
        assert len(result.trials) == 9
    assert len({one.metric for one in result.trials}) == 9


def test_a_skipped_layer_leaves_its_activation(images: Any) -> None:
    layers = keras.layers
    convolution = {"kernel_size": 3, "padding": "same", "activation": "sigmoid"}
    model = keras.Sequential(
        [
            layers.Input((4, 4, 4)), layers.Conv2D(4, use_bias=False, name="bare", **convolution),
            layers.Conv2D(4, name="biased", **convolution),
            layers.Conv2D(4, 1, activation="relu", name="last"),
        ]
    )  # fmt: skip
    tool = prepared(
        model, images, ["conv2d=keep|skip", Choice(["keep", "skip", "tanh"], type=["sigmoid", "relu"])]
    )
    for chosen in (["skip", "keep", "keep"], ["skip", "tanh", "keep"], ["keep", "skip", "skip"]):
        names = ("bare/Conv2D", "bare/Sigmoid", "last/Relu")
        tool.architecture = dict(zip(names, chosen, strict=True))
        with amanda.apply(tool):
            expected = model(images)
        assert np.array_equal(tool.finalize(model)(images), expected), chosen
    tool.architecture = {"biased/Conv2D": "skip"}
    with pytest.raises(SearchError, match=r"'skip' of biased/Conv2D .* is no module: biased adds a bias"):
        tool.finalize(model)


@pytest.mark.parametrize("mixture", [False, True])
def test_layers_that_share_a_choice_change_together(model: Any, images: Any, mixture: bool) -> None:
    choices = [Choice(["keep", "gelu", "tanh"], type=["sigmoid", "relu"], shared=True)]
    tool = prepared(model, images, choices, mixture=mixture)
    (name,) = tool.space
    if mixture:
        (alpha,) = tool.alphas()
        with amanda.apply(tool), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images) ** 2)
        assert np.all(tape.gradient(loss, alpha) != 0)
        tool.settle()
    tool.architecture = {name: "gelu"}
    with amanda.apply(tool):
        expected = model(images)
    clone = tool.finalize(model)
    assert np.array_equal(clone(images), expected)
    assert clone.get_layer("first").activation is keras.activations.gelu


@pytest.mark.parametrize("mixture", [False, True])
def test_functions_hand_over_the_gradients_of_candidates(model: Any, images: Any, mixture: bool) -> None:
    tool = prepared(model, images, [LAYERS[0], LAYERS[1]], mixture=mixture)
    if not mixture:
        tool.architecture = {"first/Conv2D": "conv5"}
    parameters = [*tool.weights(), *tool.alphas()]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, [one.value for one in model.trainable_variables])

    with amanda.apply(tool):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images) ** 2)
        expected = tape.gradient(loss, parameters)
        assert tool.gradients(parameters) == [None] * len(parameters)
        function = tf.function(step)
        function(images)
        found = tool.gradients(parameters)
        assert [one is None for one in found] == [one is None for one in expected]
        assert sum(one is not None for one in found) == (len(parameters) if mixture else 1)
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        function(images)
        function(images)
        for one, other in zip(tool.gradients(parameters), found, strict=True):
            if one is not None:
                np.testing.assert_allclose(one, 2 * other, rtol=1e-5, atol=1e-6)
    assert tool.gradients(parameters) == [None] * len(parameters)
    with pytest.raises(SearchError, match="is no parameter; give those of weights"):
        tool.gradients([images])


def test_fit_trains_mixture_weights(model: Any, images: Any) -> None:
    tool = prepared(model, images, ["sigmoid=keep|relu", "conv2d@first=keep|conv5"], mixture=True)
    parameters = [*tool.weights(), *tool.alphas()]
    before = [one.numpy() for one in parameters]
    optimizer = keras.optimizers.Adam(0.1)

    class Train(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            optimizer.apply_gradients(zip(tool.gradients(parameters), parameters, strict=True))

    model.compile("sgd", "mse")
    with amanda.apply(tool):
        model.fit(images, tf.zeros((2, 10)), epochs=2, verbose=0, callbacks=[Train()])
    assert all(np.all(one.numpy() != other) for one, other in zip(parameters, before, strict=True))

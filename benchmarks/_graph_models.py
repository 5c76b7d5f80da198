"""ResNet-50 and a BERT of Keras layers, as steps of a session and of a tf.function; chains of operators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from _measure import QUICK

Keras = Any
Step = Callable[[], object]
RATE = 1e-4


class Sizes(NamedTuple):
    """Sizes of a BERT; by default those of BERT-base."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30_000
    tokens: int = 128


class Model(NamedTuple):
    """A function that makes a model with `keras` or `tf_keras`, its input, and that in words."""

    make: Callable[[Keras], Any]
    example: Any
    words: str


def models() -> dict[str, Model]:
    """Return models by name; small ones for a quick run."""
    if QUICK:
        small = Sizes(1, 8, 2, 20, 4)
        return {"a small CNN": Model(convolutional, image(8), "8 x 8"), "BERT, 1 layer": bert_model(small)}
    return {
        "ResNet-50": application("ResNet50", 224),
        "BERT-base": bert_model(Sizes()),
    }


def short_models() -> dict[str, Model]:
    """Return models whose steps are short although they have as many operators."""
    if QUICK:
        return models()
    small = Sizes(width=64, heads=4, vocabulary=100, tokens=16)
    return {
        "ResNet-50, 1 image of 32 x 32": application("ResNet50", 32),
        "BERT of 12 layers, 64 wide": bert_model(small),
    }


def mobilenet() -> Model:
    """Return a model of many small operators, for two images; a small CNN for a quick run."""
    if QUICK:
        return models()["a small CNN"]
    model = application("MobileNetV2", 96)
    return model._replace(example=np.repeat(model.example, 2, axis=0), words="2 images of 96 x 96")


def application(name: str, size: int) -> Model:
    """Return a model of `keras.applications` with random weights, for one square image."""

    def make(keras: Keras) -> Any:
        return getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3))

    return Model(make, image(size), f"1 image of {size} x {size}")


def image(size: int) -> Any:
    """Return one image."""
    return np.random.default_rng(0).uniform(size=(1, size, size, 3)).astype(np.float32)


def bert_model(sizes: Sizes) -> Model:
    """Return a BERT with token ids for it."""
    ids = np.random.default_rng(0).integers(0, sizes.vocabulary, (1, sizes.tokens)).astype(np.int32)
    return Model(lambda keras: bert(keras, sizes), ids, f"{sizes.tokens} tokens")


def convolutional(keras: Keras) -> Any:
    """Return two convolutions and a classifier."""
    layers = [keras.layers.Conv2D(4, 3, activation="relu") for _ in range(2)]
    ends = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers, *ends])


def bert(keras: Keras, sizes: Sizes) -> Any:
    """Return token embeddings and the encoder's blocks: attention, a GELU network, layer normalisations."""
    given = keras.Input((sizes.tokens,), dtype="int32")
    hidden = keras.layers.Embedding(sizes.vocabulary, sizes.width)(given)
    for _ in range(sizes.layers):
        attended = keras.layers.MultiHeadAttention(sizes.heads, sizes.width // sizes.heads)(hidden, hidden)
        hidden = keras.layers.LayerNormalization()(hidden + attended)
        inner = keras.layers.Dense(4 * sizes.width, activation="gelu")(hidden)
        hidden = keras.layers.LayerNormalization()(hidden + keras.layers.Dense(sizes.width)(inner))
    return keras.Model(given, hidden)


def in_a_session(model: Model, training: bool) -> Step:
    """Return a step of tf_keras' model in a session; with gradients and plain descent if it trains."""
    import tf_keras

    with tf.Graph().as_default() as graph:
        network = model.make(tf_keras)
        given = tf.compat.v1.placeholder(model.example.dtype, model.example.shape)
        outputs = network(given, training=training)
        if training:
            descent = tf.compat.v1.train.GradientDescentOptimizer(RATE)
            outputs = descent.minimize(tf.reduce_sum(outputs), var_list=network.trainable_weights)
        session = tf.compat.v1.Session(graph=graph)
        session.run(tf.compat.v1.global_variables_initializer())
    return lambda: session.run(outputs, {given: model.example})


def in_a_function(model: Model, training: bool) -> Step:
    """Return the same of Keras' model in a tf.function."""
    import keras

    network, given = model.make(keras), tf.constant(model.example)

    @tf.function
    def forward(given: Any) -> Any:
        return network(given, training=False)

    @tf.function
    def train(given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(network(given, training=True))
        weights = [one.value for one in network.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return loss

    step = train if training else forward
    return lambda: step(given).numpy()


def chain_in_a_session(length: int) -> Step:
    """Return a step of a chain of operators."""
    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder(tf.float32, [4])
        output = chained(given, length)
        session = tf.compat.v1.Session(graph=graph)
    value = np.ones(4, np.float32)
    return lambda: session.run(output, {given: value})


def chain_in_a_function(length: int) -> Step:
    """Return the same in a tf.function."""
    function = tf.function(lambda given: chained(given, length))
    given = tf.ones([4])
    return lambda: function(given).numpy()


def chained(value: Any, length: int) -> Any:
    """Return a chain: every other operator is an addition to itself, every other a tanh: none is folded."""
    for number in range(length):
        value = tf.tanh(value) if number % 2 else value + value
    return value


MODES = {"session": in_a_session, "function": in_a_function}
CHAINS = {"session": chain_in_a_session, "function": chain_in_a_function}

"""Models of keras.applications in eager mode: what they give, and what a training curve is."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
from amanda.testing import Unchanged

MODELS = [
    "MobileNetV2",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("EfficientNetB0", "DenseNet121")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_bit_identical(name: str) -> None:
    keras.utils.set_random_seed(11)
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=4)
    x = keras.random.normal((2, 32, 32, 3), seed=3)

    def step() -> list[bytes]:
        with tf.GradientTape() as tape:
            y = model(x, training=False)
            loss = tf.reduce_sum(y * y)
        gradients = tape.gradient(loss, model.trainable_variables)
        return [tensor.numpy().tobytes() for tensor in (y, *gradients)]

    plain = step()
    with amanda.apply(Unchanged()):
        assert step() == plain
        assert step() == plain
    assert step() == plain


def _trained(tool: amanda.Tool | None, prune: bool) -> list[float]:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(2),
    ])  # fmt: skip
    kernel = model.layers[0].kernel
    x = keras.random.normal((8, 8, 8, 1), seed=1)
    labels = tf.constant([0, 1] * 4)
    losses = []
    for _ in range(5):
        with amanda.apply(*([tool] if tool else [])), tf.GradientTape() as tape:
            weight = kernel.value * MASK if prune else kernel.value
            hidden = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "VALID") + model.layers[0].bias.value)
            logits = model.layers[2](model.layers[1](hidden))
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
            gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign(variable.value - 0.1 * gradient)
        losses.append(float(loss))
    return losses


MASK = tf.constant([1.0, 0.0, 1.0])[:, None, None, None] * tf.ones([3, 3, 1, 4])


class Pruning(amanda.Tool):
    """Masks the weights of convolutions, and their gradients."""

    def __init__(self) -> None:
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Conv2D":
            context.insert_before_op(lambda weight: weight * MASK, inputs=["filter"])

    def _backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "Conv2DBackpropFilter":
            context.insert_after_backward_op(lambda grad: grad * MASK)


def test_pruning_gives_the_training_curve_of_code_by_hand() -> None:
    by_hand = _trained(None, prune=True)
    assert _trained(Pruning(), prune=False) == by_hand
    assert _trained(None, prune=False) != by_hand


def _python_function(x: Any) -> Any:
    return tf.reduce_sum(tf.py_function(lambda value: tf.nn.relu(value) * 2.0, [x], tf.float32))


class Encoder(keras.Model):
    """Embeddings, recurrence, attention, normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(10, 8)
        self.lstm = keras.layers.LSTM(8, return_sequences=True, use_cudnn=False)
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(3)

    def call(self, tokens: Any, training: bool = False) -> Any:
        x = self.lstm(self.embedding(tokens))
        return self.head(self.norm(x + self.attention(x, x, training=training)))


@pytest.mark.slow
def test_an_encoder_trains_as_ever() -> None:
    def trained(scope: AbstractContextManager[Any]) -> list[bytes]:
        keras.utils.set_random_seed(3)
        model, tokens = Encoder(), tf.constant([[1, 2, 3], [4, 5, 1]])
        optimizer = keras.optimizers.SGD(0.1)
        with scope:
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(tokens, training=True)))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return [bytes(variable.numpy().tobytes()) for variable in model.variables]

    plain = trained(nullcontext())
    assert trained(amanda.apply(amanda.Tool())) == plain
    assert trained(amanda.apply(Unchanged())) == plain


def test_a_python_function_has_its_gradient() -> None:
    x = tf.Variable([1.0, -2.0])
    with amanda.apply(Unchanged()):
        for _ in range(2):
            with tf.GradientTape() as tape:
                y = _python_function(x)
            assert tape.gradient(y, x).numpy().tolist() == [2.0, 0.0]

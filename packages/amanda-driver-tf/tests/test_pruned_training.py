"""Pruning a convolution's weight and its gradient trains as code that masks them by hand, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from unfused import unfused

import amanda

Array = NDArray[np.float32]
Scope = Callable[[], AbstractContextManager[Any]]
BATCH, RATE, SPARSITY = 32, 0.3, 0.5

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours


def magnitude_mask(weight: Any) -> Array:
    """0 where the smaller half of the magnitudes is."""
    magnitudes = np.abs(np.asarray(weight))
    return (magnitudes > np.quantile(magnitudes, SPARSITY)).astype(np.float32)


class Pruning(amanda.Tool):
    """Masks every convolution's weight and that weight's gradient, by the magnitudes at first."""

    def __init__(self) -> None:
        self.forward_calls = self.backward_calls = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Conv2D":
            mask = context["mask"] = magnitude_mask(context.get_value(1))
            context.insert_before_op(self.mask_weight, inputs=[1], mask=mask)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "Conv2DBackpropFilter":
            context.insert_after_backward_op(self.mask_gradient, grad_inputs=[0], mask=context["mask"])

    def mask_weight(self, weight: Any, mask: Array) -> Any:
        self.forward_calls += 1
        return weight * mask

    def mask_gradient(self, gradient: Any, mask: Array) -> Any:
        self.backward_calls += 1
        return gradient * mask


@pytest.fixture(scope="module")
def batches() -> list[tuple[Array, NDArray[np.int32]]]:
    """scikit-learn's digits: images of 8 x 8 with their labels."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    starts = range(0, 40 * BATCH, BATCH)
    return [(images[start : start + BATCH], labels[start : start + BATCH]) for start in starts]


@pytest.fixture(autouse=True)
def _without_fusion() -> Iterator[None]:
    """No operators folded or fused, so that both programs compute the same, to the bit."""
    with unfused():
        yield


def first_weights() -> list[Array]:
    """Two convolutions with their biases and a linear layer."""
    chance = np.random.default_rng(0)
    shapes = [(3, 3, 1, 8), (8,), (3, 3, 8, 8), (8,), (8 * 8 * 8, 10), (10,)]
    return [chance.normal(0, 0.2, shape).astype(np.float32) for shape in shapes]


MASKS = {index: magnitude_mask(first_weights()[index]) for index in (0, 2)}


def loss_of(images: Any, labels: Any, weights: list[Any], by_hand: bool) -> Any:
    """Cross entropy of a network of two convolutions, whose weights are masked by hand if told to."""
    kernels = [weights[index] * MASKS[index] if by_hand else weights[index] for index in MASKS]
    hidden = tf.nn.relu(tf.nn.conv2d(images, kernels[0], 1, "SAME") + weights[1])
    hidden = tf.nn.relu(tf.nn.conv2d(hidden, kernels[1], 1, "SAME") + weights[3])
    logits = tf.reshape(hidden, [-1, 8 * 8 * 8]) @ weights[4] + weights[5]
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(each)


Curve = tuple[list[float], list[Array]]
"""The loss of every step, and the weights after the last."""


def in_eager_mode(batches: Any, scope: Scope, by_hand: bool, compiled: bool = False) -> Curve:
    weights = [tf.Variable(value) for value in first_weights()]

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels, [variable.read_value() for variable in weights], by_hand)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    step = tf.function(train_step) if compiled else train_step
    with scope():
        losses = [float(step(tf.constant(images), tf.constant(labels))) for images, labels in batches]
    return losses, [weight.numpy() for weight in weights]


def in_a_function(batches: Any, scope: Scope, by_hand: bool) -> Curve:
    return in_eager_mode(batches, scope, by_hand, compiled=True)


def in_a_session(batches: Any, scope: Scope, by_hand: bool) -> Curve:
    graph = tf.Graph()
    with graph.as_default():
        images = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 1])
        labels = tf.compat.v1.placeholder(tf.int32, [None])
        weights = [tf.compat.v1.Variable(value) for value in first_weights()]
        loss = loss_of(images, labels, [tf.convert_to_tensor(weight) for weight in weights], by_hand)
        train = tf.compat.v1.train.GradientDescentOptimizer(RATE).minimize(loss)
        initialize = tf.compat.v1.global_variables_initializer()
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(initialize)
        with scope():
            feeds = [{images: image_batch, labels: label_batch} for image_batch, label_batch in batches]
            losses = [float(session.run([loss, train], feed)[0]) for feed in feeds]
        return losses, session.run(weights)


class MaskedConv2D(keras.layers.Conv2D):
    """A convolution whose weight is masked by hand."""

    mask: Array

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        return super().convolution_op(inputs, kernel * self.mask)


def in_keras_fit(batches: Any, scope: Scope, by_hand: bool) -> Curve:
    kind = MaskedConv2D if by_hand else keras.layers.Conv2D
    convolutions = [kind(8, 3, padding="same", activation="relu") for _ in MASKS]
    for convolution, mask in zip(convolutions, MASKS.values(), strict=True):
        if by_hand:
            convolution.mask = mask
    ends = [keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *ends])
    model.set_weights(first_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA, which Keras takes by itself and a scope drops, rounds otherwise.
    model.compile(keras.optimizers.SGD(RATE), loss, jit_compile=False)
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    with scope():
        model.fit(images, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[record])
    return losses, model.get_weights()


@pytest.mark.parametrize("train", [in_a_session, in_a_function, in_keras_fit, in_eager_mode])
def test_a_pruned_model_trains_as_one_masked_by_hand(train: Callable[..., Curve], batches: Any) -> None:
    by_hand, weights_by_hand = train(batches, nullcontext, by_hand=True)
    assert by_hand[-1] < 0.9 * by_hand[0], "the network does not learn"
    tool = Pruning()
    pruned, weights = train(batches, lambda: amanda.apply(tool), by_hand=False)
    assert pruned == by_hand
    for weight, expected in zip(weights, weights_by_hand, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert (tool.forward_calls, tool.backward_calls) == (2 * len(batches), 2 * len(batches))
    dense, _ = train(batches, nullcontext, by_hand=False)
    assert dense != by_hand


@pytest.mark.parametrize("train", [in_a_session, in_a_function, in_keras_fit, in_eager_mode])
def test_weights_that_are_masked_out_stay_as_they_were(train: Callable[..., Curve], batches: Any) -> None:
    _, weights = train(batches, lambda: amanda.apply(Pruning()), by_hand=False)
    for index, mask in MASKS.items():
        np.testing.assert_array_equal(weights[index][mask == 0], first_weights()[index][mask == 0])
        assert not np.array_equal(weights[index][mask == 1], first_weights()[index][mask == 1])

"""Tools with one action each, and functions to run them on; the drivers of other modes stay out."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf


class Layer:
    """y = relu(x w)^2 summed, as a function that is differentiated outside and one that is inside."""

    def __init__(self) -> None:
        self.weight = tf.Variable(np.arange(9, dtype="f4").reshape(3, 3) / 5)
        self.x = tf.constant([[1.0, -2.0, 3.0]])

        @tf.function
        def loss(x):
            return tf.reduce_sum(tf.nn.relu(tf.matmul(x, self.weight)) ** 2)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.nn.relu(tf.matmul(x, self.weight)) ** 2)
            return value, tape.gradient(value, self.weight)

        self.loss, self.step = loss, step

    def trained(self, inside: bool):
        """Loss and gradient, by a tape inside or outside of the function."""
        if inside:
            return [tensor.numpy() for tensor in self.step(self.x)]
        with tf.GradientTape() as tape:
            value = self.loss(self.x)
        return [value.numpy(), tape.gradient(value, self.weight).numpy()]

    def by_hand(self, weight=lambda w: w, hidden=lambda h: h, activated=lambda y: y, relu=tf.nn.relu):
        """What eager code gives with these functions in between."""
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(
                activated(relu(hidden(tf.matmul(self.x, weight(tf.convert_to_tensor(self.weight)))))) ** 2
            )
        return [value.numpy(), tape.gradient(value, self.weight).numpy()]


@pytest.fixture
def layer() -> Layer:
    return Layer()


@pytest.fixture(params=["traced before", "traced in the scope"])
def traced(request, layer) -> Layer:
    """The same, with its functions traced before the scope or not."""
    if request.param == "traced before":
        layer.trained(True)
        layer.trained(False)
    return layer

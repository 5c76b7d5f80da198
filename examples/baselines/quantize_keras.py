"""Quantisation of a Keras model by hand: the classes of known layers are exchanged for ones that quantise.

Every kind of layer is written anew for that; products of attention and additions stay as they are.
Source: Jacob et al. 2018, static, and in training with the straight-through estimator.
"""

import keras
import tensorflow as tf
from baselines.magnitude_keras import known
from keras import ops

EPSILON = 1.1920928955078125e-07
# A graph multiplies by the reciprocal of a constant where it should divide, which rounds otherwise.
divided = tf.math.divide_no_nan


class OfKernel:
    """Fake quantisation with a symmetric scale for each output channel, of the value that was seen last.

    mode: "calibrate" and "train" see it, the first without quantisation; else the scale is fixed.
    """

    def __init__(self, bits: int, inner: list[int], shape: tuple[int, ...]) -> None:
        self.high, self.inner, self.mode = float(2 ** (bits - 1) - 1), inner, "calibrate"
        reduced = [1 if axis in inner else size for axis, size in enumerate(shape)]
        self.largest = tf.Variable(tf.zeros(reduced), trainable=False)

    def __call__(self, x):
        if self.mode != "fixed":
            self.largest.assign(tf.reduce_max(tf.abs(x), self.inner, keepdims=True))
        if self.mode == "calibrate":
            return x
        scale = tf.maximum(divided(self.largest, self.high + 0.5), EPSILON)
        return on_grid(x, scale, tf.zeros([]), -self.high - 1, self.high)


class OfInput:
    """Fake quantisation with one affine scale, of the extremes that were seen.

    mode: "calibrate" widens them, "train" moves them by 1 % towards what is seen, else they are fixed.
    """

    def __init__(self, bits: int) -> None:
        self.high, self.mode = float(2**bits - 1), "calibrate"
        self.least, self.most = tf.Variable(0.0, trainable=False), tf.Variable(0.0, trainable=False)

    def __call__(self, x):
        least, most = tf.reduce_min(x), tf.reduce_max(x)
        if self.mode == "calibrate":
            self.least.assign(tf.minimum(self.least, least))
            self.most.assign(tf.maximum(self.most, most))
            return x
        if self.mode == "train":
            self.least.assign_add(0.01 * (least - self.least))
            self.most.assign_add(0.01 * (most - self.most))
        low, high = tf.minimum(self.least, 0.0), tf.maximum(self.most, 0.0)
        scale = tf.maximum(divided(high - low, self.high), EPSILON)
        zero_point = tf.clip_by_value(-tf.round(divided(low, scale)), 0.0, self.high)
        return on_grid(x, scale, zero_point, 0.0, self.high)


@tf.custom_gradient
def on_grid(x, scale, zero_point, low, high):
    """The nearest values of the grid; the gradient passes where nothing was clipped."""
    v = tf.round(x * divided(1.0, scale)) + zero_point
    inside = (v >= low) & (v <= high)
    value = (tf.clip_by_value(v, low, high) - zero_point) * scale
    return value, lambda gradient: (tf.where(inside, gradient, 0.0), None, None, None, None)


class QuantizedDense(keras.layers.Dense):
    def call(self, inputs, training=None):
        return self.activation(
            ops.add(ops.matmul(self.of_input(inputs), self.of_kernel(self.kernel)), self.bias)
        )

    def inner(self):
        return [0]


class QuantizedConv2D(keras.layers.Conv2D):
    def call(self, inputs):
        inputs, kernel = self.of_input(inputs), self.of_kernel(self.kernel)
        outputs = ops.conv(
            inputs, kernel, list(self.strides), self.padding, self.data_format, self.dilation_rate
        )
        return self.activation(ops.add(outputs, ops.reshape(self.bias, (1, 1, 1, -1))))

    def inner(self):
        return [0, 1, 2]


class QuantizedEinsumDense(keras.layers.EinsumDense):
    def call(self, inputs, training=None):
        outputs = ops.einsum(self.equation, self.of_input(inputs), self.of_kernel(self.kernel))
        return ops.add(outputs, self.bias)

    def inner(self):
        kernel, output = self.equation.split(",")[1].split("->")
        return [i for i, letter in enumerate(kernel) if letter not in output]


KINDS = {
    keras.layers.Dense: QuantizedDense,
    keras.layers.Conv2D: QuantizedConv2D,
    keras.layers.EinsumDense: QuantizedEinsumDense,
}


class Quantized:
    """A model whose layers quantise, calibrated by `calibrate(model)`."""

    def __init__(self, model: keras.Model, calibrate, bits: int) -> None:
        self.model, self.layers = model, known(model)
        for layer in self.layers:
            layer.__class__ = KINDS[type(layer)]
            layer.of_input, layer.of_kernel = OfInput(bits), OfKernel(bits, layer.inner(), layer.kernel.shape)
        self.set("calibrate")
        calibrate(model)
        self.set("fixed")

    def set(self, mode: str) -> None:
        """Change what the extremes do; functions that were traced are of another mode."""
        for layer in self.layers:
            layer.of_input.mode = layer.of_kernel.mode = mode
        self.model.make_predict_function(force=True)

    def remove(self) -> None:
        """Give the layers their classes back."""
        for layer in self.layers:
            layer.__class__ = type(layer).__base__
        self.model.make_predict_function(force=True)

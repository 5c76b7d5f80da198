"""Effective paths on TensorFlow: those of PyTorch, in every mode, for the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.effective_path import EffectivePath, EffectivePathTool, Layer, union


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=1e-3)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4, stride=2)
        self.fc = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x) + x), 2)
        x = torch.cat([x, torch.tanh(x)], 1)[:, 2:6].contiguous()
        x = nn.functional.avg_pool2d(self.depthwise(x), 1)
        scores: Tensor = self.fc(x.permute(0, 2, 3, 1).flatten(1))
        return scores


def twins() -> tuple[Twin, Callable[[Any], Any], Any]:
    """A model of PyTorch, the same with the same weights as a function of TensorFlow, and images."""
    torch.manual_seed(3)
    model = Twin().eval()
    nn.init.normal_(model.bn1.weight)
    nn.init.uniform_(model.bn1.running_var, 0.5, 2)

    def hwio(weight: Tensor, shape: tuple[int, ...] | None = None) -> Any:
        array = weight.detach().numpy().transpose(2, 3, 1, 0)
        return tf.Variable(array if shape is None else array.reshape(shape))

    conv1, conv2, fc = (
        hwio(model.conv1.weight),
        hwio(model.conv2.weight),
        tf.Variable(model.fc.weight.detach().numpy()),
    )
    depthwise = hwio(model.depthwise.weight, (3, 3, 4, 2))
    biases = [
        tf.Variable(one.bias.detach().numpy())
        for one in (model.conv1, model.conv2, model.depthwise, model.fc)
    ]
    norm = [
        tf.Variable(one.detach().numpy())
        for one in (model.bn1.weight, model.bn1.bias, model.bn1.running_mean, model.bn1.running_var)
    ]

    def function(x: Any) -> Any:
        x = tf.nn.bias_add(tf.nn.conv2d(x, conv1, 1, "VALID"), biases[0])
        x = tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(x, *norm, epsilon=1e-3, is_training=False)[0])
        x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, conv2, 1, "SAME") + biases[1] + x), 2, 2, "VALID")
        x = tf.concat([x, tf.tanh(x)], 3)[:, :, :, 2:6]
        x = tf.nn.depthwise_conv2d(x, depthwise, [1, 2, 2, 1], "VALID") + biases[2]
        x = tf.nn.avg_pool2d(x, 1, 1, "VALID")
        return tf.matmul(tf.reshape(x, (-1, 32)), fc, transpose_b=True) + biases[3]

    return model, function, torch.rand(4, 2, 12, 12)


def extracted(program: Callable[[], Any], theta: float = 0.5) -> list[EffectivePath]:
    tool = EffectivePathTool(theta)
    with amanda.apply(tool):
        program()
    assert not tool.result.missing
    return tool.paths()


def arranged(layer: Layer) -> list[Any]:
    """Masks with channels first, out before in."""
    neurons, weights = layer.mask(), layer.mask("weights")
    if (layer.layout or "").endswith("C"):
        neurons = neurons.transpose(2, 0, 1)
    if layer.weight_layout == "HWIO":
        weights = weights.transpose(3, 2, 0, 1)
    elif layer.weight_layout == "HWIM":
        weights = weights.transpose(2, 3, 0, 1).reshape(8, 1, 3, 3)
    elif layer.weight_layout == "IO":
        weights = weights.T
    return [layer.density(), int(neurons.sum()) if layer.type == "add" else neurons, weights]


@pytest.fixture(scope="module")
def paths() -> dict[str, list[EffectivePath]]:
    model, function, images = twins()
    channels_last = images.permute(0, 2, 3, 1).numpy()
    made = {
        "pytorch": extracted(lambda: model(images)),
        "eager": extracted(lambda: function(tf.constant(channels_last))),
        "function": extracted(lambda: tf.function(function)(tf.constant(channels_last))),
    }
    with tf.Graph().as_default():
        _, function_of_graph, _ = twins()
        made["session"] = extracted(lambda: run_in_session(function_of_graph, channels_last))
    return made


def run_in_session(function: Callable[[Any], Any], images: Any) -> None:
    data = tf.compat.v1.placeholder(tf.float32, (None, *images.shape[1:]))
    scores = function(data)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(scores, {data: images})


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_paths_are_those_of_pytorch_for_the_same_weights(
    paths: dict[str, list[EffectivePath]], mode: str
) -> None:
    for path, twin in zip(paths[mode], paths["pytorch"], strict=True):
        assert path.label == twin.label
        assert len(path.layers) == len(twin.layers)
        for mine, theirs in zip(path.layers.values(), twin.layers.values(), strict=True):
            assert mine.sizes == theirs.sizes
            for one, other in zip(arranged(mine), arranged(theirs), strict=True):
                assert np.array_equal(one, other), (mine.type, mode)
    assert len(union(paths[mode]).layers) == 7


def test_a_model_of_keras_has_the_same_paths_eagerly_and_when_it_predicts() -> None:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    images = layers.Input((6, 6, 1))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same", strides=2)(images))
    y = layers.SeparableConv2D(4, 3, padding="same")(layers.ReLU()(x))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([x, y])))
    model = keras.Model(images, layers.Dense(3, activation="softmax")(layers.Dropout(0.5)(x)))
    data = np.random.default_rng(0).random((3, 6, 6, 1)).astype(np.float32)
    eager = extracted(lambda: model(data, training=False), 0.95)
    predicted = extracted(lambda: model.predict(data, verbose=0), 0.95)
    assert len(union(eager).layers) == 6
    for one, other in zip(eager, predicted, strict=True):
        assert one.label == other.label
        for mine, theirs in zip(one.layers.values(), other.layers.values(), strict=True):
            assert np.array_equal(mine.synapses, theirs.synapses)
            assert np.array_equal(mine.weights, theirs.weights)

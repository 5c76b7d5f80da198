"""Subgraph rewriting on TensorFlow: eagerly, in functions and in sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import resnet50

import amanda
from amanda.tools.rewrite import Capture, Op, RewriteTool, Rule, insert_after

v1 = tf.compat.v1


def small(library: Any) -> Any:
    """Convolutions with normalisations, of which one has a bias, and one is of each channel."""
    layers = library.layers
    return library.Sequential(
        [
            layers.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(),
            layers.DepthwiseConv2D(3, use_bias=False), layers.BatchNormalization(),
        ]
    )  # fmt: skip


def statistics(shapes: Any) -> list[Any]:
    generator = np.random.default_rng(0)
    normal, uniform = partial(generator.normal, 0, 0.1), partial(generator.uniform, 0.5, 1.5)
    return [(normal if len(shape) > 1 else uniform)(size=shape) for shape in shapes]


def with_statistics(model: Any) -> Any:
    model.set_weights(statistics([tuple(one.shape) for one in model.weights]))
    return model


IMAGES = np.random.default_rng(1).random((2, 8, 8, 3)).astype(np.float32)


def agree(rewritten: Any, expected: Any) -> None:
    for one, other in zip(rewritten, expected, strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(one) / scale, np.asarray(other) / scale, atol=2e-5)


class InASession:
    """A model of Keras 2 and the gradients of its weights, in a graph with statistics of their own."""

    def __init__(self, make: Callable[[Any], Any], images: Any, gradients: bool = True) -> None:
        import tf_keras

        with tf.Graph().as_default() as graph:
            self.data = v1.placeholder(tf.float32, images.shape)
            model = make(tf_keras)
            output = model(self.data, training=False)
            weights = model.trainable_weights if gradients else []
            loss = tf.reduce_sum(output**2)
            self.wanted = [output, *(v1.gradients(loss, weights) if weights else ())]
            values = statistics([tuple(one.shape) for one in model.weights])
            start = [v1.assign(one, value) for one, value in zip(model.weights, values, strict=True)]
        self.images = images
        self.session = v1.Session(graph=graph)
        self.session.run(start)

    def __call__(self) -> Any:
        return self.session.run(self.wanted, {self.data: self.images})


def eager(model: Any) -> Any:
    with tf.GradientTape() as tape:
        output = model(IMAGES, training=False)
        loss = tf.reduce_sum(output**2)
    return [output, *tape.gradient(loss, model.trainable_weights)]


def test_a_folded_normalisation_and_its_gradients_eagerly() -> None:
    model, tool = with_statistics(small(keras)), RewriteTool(["fold_batch_norm"])
    with amanda.apply(tool):
        for _ in range(3):
            rewritten = eager(model)
    assert [(one.replaced, one.obstacle) for one in tool.result.matches] == [(2, "")] * 2
    agree(rewritten, eager(model))


def test_a_folded_normalisation_and_its_gradients_in_a_function() -> None:
    model, tool = with_statistics(small(keras)), RewriteTool(["fold_batch_norm"])
    with amanda.apply(tool) as scope:
        step = tf.function(lambda: eager(model))
        for _ in range(2):
            rewritten = step()
    assert [one.replaced for one in tool.result.matches] == [2, 2]
    assert {one.ops for one in tool.result.matches} == {
        ("conv2d", "BiasAdd", "mul", "add"), ("depthwise_conv2d", "mul", "add"),
    }  # fmt: skip
    agree(rewritten, eager(model))
    assert not scope.report


def test_a_folded_normalisation_and_its_gradients_in_a_session() -> None:
    pytest.importorskip("tf_keras")

    def make(library: Any) -> Any:
        layers = library.layers
        return library.Sequential(
            [
                layers.Input((8, 8, 3)), layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
                layers.DepthwiseConv2D(3, use_bias=False), layers.BatchNormalization(),
            ]
        )  # fmt: skip

    run, tool = InASession(make, IMAGES), RewriteTool(["fold_batch_norm"])
    with amanda.apply(tool):
        for _ in range(2):
            rewritten = run()
    assert [one.ops for one in tool.result.matches] == [
        ("conv2d", "batch_norm"), ("depthwise_conv2d", "batch_norm"),
    ]  # fmt: skip
    assert [one.replaced for one in tool.result.matches] == [2, 2]
    agree(rewritten, run())


def test_a_normalisation_that_learns_is_not_folded() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        kernel = tf.constant(np.random.default_rng(0).random((3, 3, 3, 4)).astype(np.float32))
        y = tf.nn.conv2d(tf.constant(IMAGES), kernel, 1, "VALID")
        y = v1.nn.fused_batch_norm(y, tf.ones(4), tf.zeros(4), is_training=True)[0]
        tool, expected = RewriteTool(["fold_batch_norm"]), session.run(y)
        with amanda.apply(tool):
            assert np.array_equal(session.run(y), expected)
    assert "condition" in tool.result.matches[0].why


def resnet(library: Any) -> Any:
    return resnet50(library, 32, 10)


def mobilenet_v2(library: Any) -> Any:
    return library.applications.MobileNetV2((32, 32, 3), weights=None, classes=10)


@pytest.mark.long
@pytest.mark.parametrize(("make", "pairs"), [(resnet, 53), (mobilenet_v2, 52)])
def test_twins_of_models_of_torchvision_are_folded_in_every_mode(make: Any, pairs: int) -> None:
    pytest.importorskip("tf_keras")
    images = np.random.default_rng(2).random((1, 32, 32, 3)).astype(np.float32)
    model = with_statistics(make(keras))
    session = InASession(make, images, gradients=False)
    function = tf.function(lambda: [model(images, training=False)])
    programs = (lambda: [model(images, training=False)], 2), (function, 1), (session, 1)
    for program, times in programs:
        tool = RewriteTool(["fold_batch_norm"])
        with amanda.apply(tool):
            for _ in range(times):
                rewritten = program()
        assert tool.result.count() == pairs
        assert all(one.replaced == 1 for one in tool.result.matches)
        agree(rewritten, program())


def program(x: Any) -> Any:
    return tf.nn.relu(tf.sigmoid(tf.tanh(tf.negative(x))))


def labelled(pattern: Op, label: float, name: str) -> Rule:
    return Rule(pattern, lambda match: match.original() + label, name=name)


def test_of_matches_that_overlap_in_a_graph_the_earliest_and_then_the_longest_is_replaced() -> None:
    first = Op("neg")
    rules = [
        labelled(Op("tanh", first), 10, "short"),
        labelled(Op("sigmoid", Op("tanh", first)), 100, "long"),
        labelled(Op("relu", Op("sigmoid")), 1000, "late"),
    ]
    x, tool, function = tf.constant([-1.0]), RewriteTool(rules), tf.function(program)
    with amanda.apply(tool):
        for _ in range(3):
            result = float(function(x)[0])
    assert result == pytest.approx(100 + float(program(x)[0]), rel=1e-5)
    states = {match.rule: match.obstacle for match in tool.result.matches}
    assert states["long"] == ""
    assert "overlaps with long" in states["short"]
    assert "overlaps with long" in states["late"]


def test_a_match_of_a_graph_whose_intermediate_is_read_elsewhere_is_not_replaced() -> None:
    rule = labelled(Op("relu", Op("neg")), 10, "ten")

    @tf.function
    def function(x: Any) -> Any:
        y = tf.negative(x)
        return tf.nn.relu(y) + tf.tanh(y)

    tool, x = RewriteTool([rule]), tf.constant([-1.0])
    expected = function(x)
    with amanda.apply(tool):
        for _ in range(2):
            result = function(x)
    assert np.array_equal(result, expected)
    assert "read by tanh" in tool.result.matches[0].obstacle


@pytest.mark.parametrize("wrap", [lambda one: one, tf.function])
def test_ops_are_inserted_and_replaced_by_one_source(wrap: Any) -> None:
    rules = [
        insert_after(Op("tanh", Op("neg")), lambda y: y + 10),
        Rule(Op("relu", Capture("x")), lambda match: match["x"]),
    ]
    layer = keras.layers.Lambda(lambda x: tf.nn.relu(tf.tanh(tf.negative(x)) - 100.0))
    model = wrap(keras.Sequential([keras.layers.Input((2,)), layer]))
    x = tf.constant([[1.0, 2.0]])
    with amanda.apply(RewriteTool(rules)):
        for _ in range(2):
            y = model(x)
    np.testing.assert_allclose(y, np.tanh(-x) - 90, rtol=1e-5)

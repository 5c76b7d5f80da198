"""FLOPs on TensorFlow: the same numbers in eager mode, in functions and in sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import resnet50

import amanda
from amanda.tools.flops import FlopsTool

CONVOLUTION = 2 * 6 * 6 * 5 * 3 * 9
DEPTHWISE = 2 * 4 * 4 * 5 * 9
DENSE = 2 * 80 * 7


@pytest.fixture
def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 3)), keras.layers.Conv2D(5, 3, activation="relu"),
            keras.layers.DepthwiseConv2D(3), keras.layers.BatchNormalization(), keras.layers.Flatten(),
            keras.layers.Dense(7),
        ]
    )  # fmt: skip


@pytest.fixture
def images() -> Any:
    return np.ones((2, 8, 8, 3), np.float32)


def counted(program: Callable[[], Any]) -> Any:
    tool = FlopsTool()
    with amanda.apply(tool):
        program()
    return tool.result


def test_a_model_costs_the_same_eagerly_and_in_a_function(model: keras.Model, images: Any) -> None:
    for program in (lambda: model(images, training=False), lambda: model.predict(images, verbose=0)):
        result = counted(program)
        assert result.total("macs") == CONVOLUTION + DEPTHWISE + DENSE
        assert not result.unsupported


def test_a_batch_whose_size_the_function_does_not_know_is_counted(model: keras.Model, images: Any) -> None:
    def program() -> None:
        for count in (1, 2, 2):
            model.predict(images[:count], verbose=0)

    assert counted(program).total("macs") == 5 * (CONVOLUTION + DEPTHWISE + DENSE) // 2


def test_products_in_the_condition_of_a_loop_count_at_each_evaluation() -> None:
    @tf.function
    def doubled(x: Any) -> Any:
        while tf.reduce_sum(x @ x) < 100.0:
            x = x * 2.0
        return x

    assert counted(lambda: doubled(tf.ones([2, 2]))).total("macs") == 3 * 8


@pytest.mark.parametrize("eagerly", [False, True])
def test_training_costs_each_gradient_that_is_computed(
    model: keras.Model, images: Any, eagerly: bool
) -> None:
    model.compile("sgd", "mse", run_eagerly=eagerly)
    result = counted(lambda: model.fit(images, np.ones((2, 7), np.float32), verbose=0))
    assert result.total("macs", "forward") == CONVOLUTION + DEPTHWISE + DENSE
    of_the_images = CONVOLUTION if eagerly else 0  # which a function leaves out
    wanted = CONVOLUTION + 2 * DEPTHWISE + 2 * DENSE + of_the_images
    assert result.total("macs", "backward") == wanted
    assert not result.unsupported


def test_a_session_costs_the_same(images: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        data = v1.placeholder(tf.float32, (2, 8, 8, 3))
        kernel = v1.get_variable("kernel", (3, 3, 3, 5))
        weight = v1.get_variable("weight", (180, 7))
        hidden = tf.reshape(tf.nn.relu(tf.nn.conv2d(data, kernel, 1, "VALID")), (-1, 180))
        loss = tf.reduce_sum(tf.matmul(hidden, weight))
        gradients = v1.gradients(loss, [kernel, weight])
        start = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session:
        session.run(start)
        result = counted(lambda: session.run(gradients, {data: images}))
    dense = 2 * 180 * 7
    assert result.total("macs", "forward") == CONVOLUTION  # nothing that is fetched needs the product
    assert result.total("macs", "backward") == CONVOLUTION + 2 * dense
    assert not result.unsupported


def test_what_is_kept_does_not_grow_with_executions(model: keras.Model, images: Any) -> None:
    tool, sizes, function = FlopsTool(), [], tf.function(model)
    function(images)
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(3):
            model(images)
            function(images)
            sizes.append(len(tool._op_cost_by_key))
    assert sizes[0] == sizes[-1]
    assert tool.result.total("macs") == 6 * (CONVOLUTION + DEPTHWISE + DENSE)


def in_a_session(make: Callable[[Any], Any], images: Any) -> Callable[[], Any]:
    """One prediction by a model in a graph; Keras 3 has no layers for sessions."""
    import tf_keras

    with tf.Graph().as_default() as graph:
        data = tf.compat.v1.placeholder(tf.float32, images.shape)
        output = make(tf_keras)(data, training=False)
        start = tf.compat.v1.global_variables_initializer()
    session = tf.compat.v1.Session(graph=graph)
    session.run(start)
    return lambda: session.run(output, {data: images})


TWINS = {
    "resnet50": (resnet50, 4_089_184_256),
    "mobilenet_v2": (lambda library: library.applications.MobileNetV2(weights=None), 300_774_272),
}
"""Keras' twins of torchvision's models, and the multiply-accumulates of both for an image of 224 by 224."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2"])
def test_a_twin_of_a_model_of_torchvision_costs_the_same_in_every_mode(name: str) -> None:
    make, wanted = TWINS[name]
    images, model = np.zeros((1, 224, 224, 3), np.float32), make(keras)
    for program in (
        lambda: model(images, training=False),
        lambda: tf.function(model)(images, training=False),
        in_a_session(make, images),
    ):
        result = counted(program)
        assert result.total("macs") == wanted
        assert not result.unsupported


def gradients(compute: Callable[..., Any], *extents: tuple[int, ...]) -> Callable[[], Any]:
    """The gradients of a function of arrays of ones."""
    values = [tf.ones(one) for one in extents]

    def program() -> Any:
        with tf.GradientTape() as tape:
            for one in values:
                tape.watch(one)
            result = compute(*values)
        return result, tape.gradient(result, values)

    return program


def cell(kind: Any) -> Callable[[Any], Any]:
    """The output of one step of a cell of width 5."""
    layer = kind(5)
    layer.build((2, 3))
    states = [tf.ones((2, 5))] * (2 if kind is keras.layers.LSTMCell else 1)
    return lambda x: layer(x, states)[0]


PRODUCTS = {
    "einsum": (lambda a, b: tf.einsum("...ij,...jk->...ik", a, b), ((2, 3, 4), (2, 4, 5)), 120, 240),
    "tensordot": (lambda a, b: tf.tensordot(a, b, 2), ((3, 4, 5), (4, 5, 6)), 360, 720),
    "matvec": (tf.linalg.matvec, ((3, 4), (4,)), 12, 24),
    "transposed": (lambda a, b: tf.matmul(a, b, transpose_b=True), ((2, 3, 4), (2, 5, 4)), 120, 240),
    "LSTMCell": (cell(keras.layers.LSTMCell), ((2, 3),), 320, 120),
    "GRUCell": (cell(keras.layers.GRUCell), ((2, 3),), 240, 90),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_any_name_is_counted_forward_and_backward(name: str) -> None:
    compute, extents, forward, backward = PRODUCTS[name]
    result = counted(tf.function(gradients(compute, *extents)))
    assert (result.total("macs", "forward"), result.total("macs", "backward")) == (forward, backward)
    assert not result.missing


def test_decompositions_and_transforms_have_flops() -> None:
    def program() -> None:
        matrix = tf.eye(3)
        tf.linalg.inv(matrix)
        tf.signal.fft(tf.ones((4, 8), tf.complex64))

    flops = {row[0]: row[3] for row in counted(program).by("type").rows()}
    assert (flops["MatrixInverse"], flops["FFT"]) == (2 * 27, 5 * 32 * 3)


def test_a_gather_reads_the_rows_that_it_gives() -> None:
    table = tf.Variable(tf.ones((1000, 8)))
    places = counted(lambda: tf.gather(tf.convert_to_tensor(table), [1, 2, 3])).ops
    gathered = next(place for place in places if place.type in ("embedding", "GatherV2"))
    assert gathered.bytes == 2 * 3 * 32 + 3 * 4 + 4  # of which the last is the axis

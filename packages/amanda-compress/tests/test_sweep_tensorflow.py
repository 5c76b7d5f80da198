"""Sweeps on Keras, against pruning one kernel at a time by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from amanda.tools.sweep import BitsSweep, SparsitySweep

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours

LEVELS = [0.5, 0.9]


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    found = load_digits()
    return (found.images[:300, :, :, None] / 16).astype(np.float32), found.target[:300]


@pytest.fixture(scope="module")
def model(digits: tuple[Any, Any]) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)), layers.Conv2D(6, 3, activation="relu"), layers.MaxPooling2D(2),
            layers.Conv2D(6, 2, activation="relu"), layers.Flatten(), layers.Dense(10),
        ]
    )  # fmt: skip
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), objective)
    model.fit(*digits, batch_size=30, epochs=8, verbose=0)
    return model


def dropped(kernel: Any, sparsity: float) -> Any:
    """Without the share of smallest magnitude."""
    order = np.argsort(np.abs(kernel).reshape(-1), kind="stable")
    mask = np.ones(kernel.size, np.float32)
    mask[order[: round(sparsity * kernel.size)]] = 0
    return kernel * mask.reshape(kernel.shape)


def by_hand(model: keras.Model, evaluate: Any) -> list[float]:
    """The metric with all kernels pruned, then with each, at each level."""
    kernels = [layer.kernel for layer in model.layers if hasattr(layer, "kernel")]
    values = [kernel.numpy() for kernel in kernels]
    found = []
    for chosen in (kernels, *([kernel] for kernel in kernels)):
        for level in LEVELS:
            for kernel, value in zip(kernels, values, strict=True):
                kernel.assign(dropped(value, level) if any(kernel is one for one in chosen) else value)
            found.append(evaluate())
    for kernel, value in zip(kernels, values, strict=True):
        kernel.assign(value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [True, pytest.param(False, marks=pytest.mark.long)])
def test_each_point_is_what_one_kernel_pruned_by_hand_gives(
    model: keras.Model, digits: tuple[Any, Any], eagerly: bool
) -> None:
    images, labels = digits

    def evaluate() -> float:
        scores = np.asarray(model(images) if eagerly else model.predict(images, verbose=0))
        return float((scores.argmax(1) == labels).mean() + np.abs(scores).mean())

    before = [value.copy() for value in model.get_weights()]
    result = SparsitySweep(evaluate, LEVELS, progress=False).run()
    assert [point.metric for point in result.points] == pytest.approx(by_hand(model, evaluate), rel=1e-6)
    assert len({point.metric for point in result.points}) == 8
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.slow
def test_bits_are_swept_where_keras_evaluates(model: keras.Model, digits: tuple[Any, Any]) -> None:
    before = [value.copy() for value in model.get_weights()]
    sweep = BitsSweep(lambda: -model.evaluate(*digits, verbose=0), [8, 2], progress=False)
    result = sweep.run()
    assert len(result.points) == 8
    assert result.dense is not None
    for point in result.points:
        assert point.metric is not None
        assert (point.metric > result.dense - 0.05) == (point.level == 8)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_a_session_is_swept_as_any_program() -> None:
    random = np.random.default_rng(0)
    kernel, weight = random.normal(size=(3, 3, 1, 4)), random.normal(size=(144, 3))
    images = random.random((5, 8, 8, 1))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        data = tf.compat.v1.placeholder(tf.float64, (None, 8, 8, 1))
        variables = [tf.Variable(kernel), tf.Variable(weight)]
        hidden = tf.nn.relu(tf.nn.conv2d(data, variables[0], 1, "VALID"))
        total = tf.reduce_sum(tf.matmul(tf.reshape(hidden, (-1, 144)), variables[1]))
        session.run(tf.compat.v1.global_variables_initializer())

        def evaluate() -> Any:
            return session.run(total, {data: images})

        result = SparsitySweep(evaluate, [0.5], progress=False).run()
        by_hand = []
        pruned = (dropped(kernel, 0.5), dropped(weight, 0.5))
        for values in (pruned, (pruned[0], weight), (kernel, pruned[1])):
            for variable, value in zip(variables, values, strict=True):
                variable.load(value, session)
            by_hand.append(evaluate())
    assert [point.site.type for point in result.points] == ["all", "conv2d", "matmul"]
    assert [point.metric for point in result.points] == pytest.approx(by_hand, rel=1e-12)

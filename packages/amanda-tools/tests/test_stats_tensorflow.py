"""Statistics on TensorFlow: the same in eager mode, in functions and in sessions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.kit._tensors_tensorflow import TensorFlowTensorLibrary
from amanda.tools.stats import Accumulator, Bins, StatsResult, StatsTool


def measured(program: Any, **options: Any) -> StatsResult:
    tool = StatsTool(**options)
    with amanda.apply(tool):
        program()
    return tool.result


def told(result: StatsResult, **wanted: str) -> Any:
    (found,) = [m for m in result.measured if all(getattr(m, key) == value for key, value in wanted.items())]
    return found


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32", "uint8", "bool"])
def test_every_element_type_is_measured_as_numpy_does(name: str) -> None:
    numbers = tf.cast(tf.abs(tf.random.stateless_normal((999,), (1, 2))) * 5, name)
    accumulator = Accumulator(Bins.of(4096))
    for part in tf.split(numbers, [1, 500, 498]):
        accumulator.add(part)
    wanted = numbers.numpy().astype(np.float64)
    found = accumulator.statistics()
    np.testing.assert_allclose(
        (found.mean, found.std, found.l1, found.l2),
        (wanted.mean(), wanted.std(), np.abs(wanted).sum(), np.linalg.norm(wanted)), rtol=1e-13,
    )  # fmt: skip
    assert (found.least, found.most, found.zeros) == (wanted.min(), wanted.max(), (wanted == 0).sum())
    for q in (0.0, 0.1, 0.5, 0.99):
        quantile = accumulator.sketch().quantile(q, found.least, found.most)
        assert quantile == pytest.approx(np.quantile(wanted, q), rel=1 / 32)


@pytest.mark.parametrize("on_host", [True, False])
def test_nan_inf_and_complex_numbers(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_host:
        monkeypatch.setattr(
            TensorFlowTensorLibrary, "blocks", lambda _, numbers: [tf.cast(numbers, tf.float64)]
        )
    accumulator = Accumulator(Bins.of(256))
    accumulator.add(tf.constant([np.nan, np.inf, -np.inf, 2.0]))
    accumulator.add(tf.constant([3 + 4j], tf.complex64))
    accumulator.add(tf.zeros((0, 2)))
    found = accumulator.statistics()
    assert (found.nan, found.inf, found.negative_inf, found.count, found.mean) == (1, 1, 1, 2, 3.5)
    assert [count for *_, count in accumulator.sketch().histogram()] == [1, 1]
    assert accumulator.sketch().quantile(1.0, found.least, found.most) == pytest.approx(5.0, rel=0.5)


@pytest.fixture
def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.layers.Input((8, 8, 3)), keras.layers.Conv2D(5, 3, activation="relu"),
         keras.layers.Flatten(), keras.layers.Dense(7)]
    )  # fmt: skip


@pytest.mark.parametrize("eagerly", [True, False])
def test_training_is_measured_eagerly_and_in_a_function(model: keras.Model, eagerly: bool) -> None:
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
    kernel = model.layers[0].kernel.numpy()
    made = model.layers[0](images).numpy()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(images)))
    gradient = tape.gradient(loss, model.layers[0].kernel).numpy()
    model.compile("sgd", "mse", run_eagerly=eagerly)
    result = measured(lambda: model.fit(images, np.zeros((4, 7), np.float32), batch_size=4, verbose=0))
    weight = told(result, phase="forward", type="conv2d", tensor="weight").statistics
    assert (weight.count, weight.mean) == (kernel.size, pytest.approx(kernel.mean(dtype=np.float64)))
    relu = told(result, phase="forward", type="relu", tensor="output 0").statistics
    assert relu.sparsity == pytest.approx((made == 0).mean())
    assert relu.l2 == pytest.approx(np.linalg.norm(made.astype(np.float64)), rel=1e-5)
    found = told(result, type="conv2d_backward", tensor="weight gradient").statistics
    assert found.l2 == pytest.approx(np.linalg.norm(gradient.astype(np.float64)), rel=1e-4)
    assert found.count == gradient.size


def test_a_session_is_measured() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        data = v1.placeholder(tf.float32, (None, 3))
        result = tf.nn.relu(data - 2.0)
    with v1.Session(graph=graph) as session:

        def program() -> None:
            for i in range(3):
                session.run(result, {data: np.full((2, 3), i + 1.0)})

        found = told(measured(program), type="relu")
    assert found.executions == 3
    assert (found.statistics.mean, found.statistics.sparsity) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_tensors_that_share_memory_are_each_measured() -> None:
    row = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    other = row * 2
    given = [row, row[:40_000], row, other]
    together = [Accumulator(Bins.of(4096)) for _ in given]
    Accumulator.add_all(zip(together, given, strict=True))
    for found, one in zip(together, given, strict=True):
        alone = Accumulator(Bins.of(4096))
        alone.add(one)
        assert (found.statistics(), found.sketch()) == (alone.statistics(), alone.sketch())


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "uint64"])
def test_small_integers_are_measured_together_as_they_are_alone(dtype: str) -> None:
    info = np.iinfo(dtype if dtype != "bool" else "int8")
    rows = [[0, 1, 1, 0], [info.max, info.max - 1], [info.min, 3], [7]]
    given = [np.array(row).astype(dtype) for row in rows]
    together = [Accumulator(Bins.of(4096)) for _ in given]
    Accumulator.add_all(zip(together, given, strict=True))
    for found, one in zip(together, given, strict=True):
        alone = Accumulator(Bins.of(4096))
        alone.add(one)
        assert (found.statistics(), found.sketch()) == (alone.statistics(), alone.sketch())


def gathered_program() -> Any:
    """Return a training step on batches of any size: weights that broadcast, lists, loops, element types."""
    weight, bias = (
        tf.Variable(tf.random.stateless_normal((6, 4), (1, 2))),
        tf.Variable([[1.0, 0.0, 3.0, 4.0]]),
    )

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            first, second = tf.split(tf.nn.relu(x @ weight) * bias, 2, axis=1)
            y = tf.concat([first, tf.transpose(tf.transpose(second))], 1)
            for _ in tf.range(2):
                y = tf.tanh(y) / tf.reduce_sum(y * 0.0, 1, keepdims=True)
            half = tf.cast(tf.cast(y, tf.float16), tf.bfloat16)
            loss = tf.reduce_sum(y) + tf.cast(tf.reduce_sum(half), tf.float32)
        whole = tf.cast(x > 0.5, tf.int32) + tf.cast(x * 9, tf.int32)
        return tape.gradient(loss, [weight, bias]), whole, tf.abs(tf.complex(x, x)), tf.as_string(whole)

    return step


def rows(native: bool, monkeypatch: pytest.MonkeyPatch, clears: bool = False, every: int = 1) -> Any:
    if not native:
        monkeypatch.setattr(StatsTool, "_tensors_of_batch", lambda self, executions: ())
    step, tool = gathered_program(), StatsTool(every=every)
    with amanda.apply(tool):
        for number, size in enumerate((3, 1, 5, 1, 40_000)):
            step(tf.random.stateless_normal((size, 6), (size, 1)))
            if clears and number == 1:
                tool.clear()
    monkeypatch.undo()
    return tool.result.measured


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_graphs_are_measured_natively_as_in_python(
    clears: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, python = (rows(is_native, monkeypatch, clears, every) for is_native in (True, False))
    assert len(native) == len(python) > 30
    for found, wanted in zip(native, python, strict=True):
        for name in ("phase", "type", "module", "tensor", "dtype", "executions", "sketch"):
            assert getattr(found, name) == getattr(wanted, name), (name, found, wanted)
        numbers, expected = (vars(entry.statistics) for entry in (found, wanted))
        for name, value in expected.items():
            if name in ("mean", "m2", "absolute"):
                value = pytest.approx(value, rel=1e-12, abs=1e-12 * expected["absolute"], nan_ok=True)
            assert numbers[name] == value, (name, found)
    roles = {found.tensor for found in native}
    assert {"weight", "weight gradient", "gradient 0", "output 0", "output 1"} <= roles

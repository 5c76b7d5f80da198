"""Functions with jit_compile=True that XLA alone can run: they run as they are, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

pytestmark = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="kernels of a CPU are few"
)

X = tf.constant(np.random.default_rng(0).random((1, 4, 4, 4, 4)), tf.float32)
KERNEL = tf.Variable(np.random.default_rng(1).random((2, 2, 2, 2, 4)), dtype=tf.float32)
COUNT = tf.Variable(0.0)


@tf.function(jit_compile=True)
def grouped(x: Any) -> Any:
    COUNT.assign_add(1.0)
    return tf.nn.conv3d(x, KERNEL, [1] * 5, "SAME")


@tf.function(jit_compile=True)
def channels_first(x: Any) -> Any:
    return tf.nn.max_pool2d(tf.transpose(x[0], [0, 3, 1, 2]), 2, 2, "SAME", data_format="NCHW")


@tf.function(jit_compile=True)
def grouped_gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.conv2d(x[0], KERNEL[0], 1, "SAME")
    return tape.gradient(y, x)


@tf.function(jit_compile=True)
def compiled_within(x: Any) -> Any:
    return tf.nn.relu(grouped(x))


@tf.function
def around(x: Any) -> Any:
    return tf.nn.relu(grouped(tf.nn.relu(x))) + 1.0


@tf.function(input_signature=[tf.TensorSpec([None, None, None, None, 4])])
def around_any_shape(x: Any) -> Any:
    return tf.nn.relu(grouped(tf.nn.relu(x)))


@tf.function
def loop(x: Any) -> Any:
    for _ in tf.range(3):
        x = grouped(x)
    return x


@tf.function
def differentiated(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = grouped(tf.nn.relu(x))
    return y, tape.gradient(y, [x, KERNEL])


def taped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(tf.nn.relu(x))
        return y, tape.gradient(y, [x, KERNEL])

    return step


PROGRAMS = {
    "grouped": grouped, "channels_first": channels_first, "grouped_gradient": grouped_gradient,
    "compiled_within": compiled_within, "around": around, "around_any_shape": around_any_shape, "loop": loop,
    "differentiated": differentiated, "taped": taped(grouped), "taped_around": taped(around),
    "taped_loop": taped(loop),
}  # fmt: skip


RUN_BY_ONEDNN = {"channels_first", "grouped_gradient"}
"""Programs for which oneDNN has kernels, on processors on which TensorFlow uses it."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_computes_what_it_computes_alone(name: str, changing: amanda.Tool) -> None:
    COUNT.assign(0.0)
    expected, count = tf.nest.flatten(PROGRAMS[name](X)), COUNT.numpy()
    COUNT.assign(0.0)
    with amanda.apply(changing) as scope:
        results = tf.nest.flatten(PROGRAMS[name](X))
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(results, expected, strict=True))
    assert COUNT.numpy() == count  # trials leave variables alone
    reasons = "; ".join(entry.reason for entry in scope.report)
    if "fails without XLA, so that it runs uninstrumented" not in reasons:
        assert name in RUN_BY_ONEDNN
        assert "in a scope it runs without XLA" in reasons


@pytest.fixture
def changing() -> amanda.Tool:
    """A tool that hands back equal new tensors ahead of each op, and looks at gradients."""

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(
            lambda *values: [value + 0 if _is_float(value) else value for value in values]
        )

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *gradients: None), backward=True
    )
    return tool


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and tf.as_dtype(value.dtype).is_floating


def test_function_that_runs_without_xla_is_instrumented_and_its_state_changes_once() -> None:
    count, inputs = tf.Variable(0.0), []

    @tf.function(jit_compile=True)
    def step(x: Any) -> Any:
        count.assign_add(1.0)
        return tf.nn.relu(x)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "Relu":
            context.insert_before_op(lambda x: inputs.append(x.numpy().tolist()))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool) as scope:
        step(tf.constant([-1.0, 2.0]))
    assert inputs == [[-1.0, 2.0]]
    assert count.numpy() == 1.0
    assert [entry.reason for entry in scope.report] == ["in a scope it runs without XLA"]


def test_error_of_the_program_is_that_which_it_raises_alone() -> None:
    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None] * 5)])
    def wrong(x: Any) -> Any:
        return tf.nn.conv3d(x, tf.ones([2, 2, 2, 3, 4]), [1] * 5, "SAME")

    with pytest.raises(tf.errors.OpError) as bare:
        wrong(X)
    with pytest.raises(type(bare.value)), amanda.apply(amanda.Tool()):
        wrong(X)

"""A replacement that reads what other ops of its graph are given, forward and backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import ActionError, RoutineError

v1 = tf.compat.v1
X = np.array([0.5, -1.5, 2.0], np.float32)
W = np.array([1.0, 2.0, -1.0], np.float32)


class Fuse(amanda.Tool):
    """What `Tanh` gives of a product is computed of the factors: 10 sin(a) b instead of tanh(a * b)."""

    def __init__(self) -> None:
        super().__init__()
        self.product: int | None = None
        self.runs = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "Mul":
            self.product = context.get_op_id()
        elif context.get_op_type() == "Tanh":
            reads = [(self.product, 0), (self.product, 1)]
            context.replace_op(self.compute, inputs=[], reads=reads)

    def compute(self, reads: list[Any]) -> Any:
        self.runs += 1
        a, b = reads
        return 10 * tf.sin(a) * b


def fused(x: Any, w: Any) -> Any:
    return 10 * np.sin(x) * w


def program(x: Any, w: Any) -> Any:
    return tf.tanh(tf.multiply(x, w)) + 3


GRADIENTS = (10 * np.cos(X) * W, 10 * np.sin(X))


def in_a_session() -> Any:
    with tf.Graph().as_default():
        x, w = v1.placeholder(tf.float32, (3,)), v1.placeholder(tf.float32, (3,))
        y = program(x, w)
        fetches = [y, *v1.gradients(y, [x, w])]
        with v1.Session() as session:
            return [session.run(fetches, {x: X, w: W}) for _ in range(2)][-1]


def in_a_function() -> Any:
    @tf.function
    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = program(x, w)
        return [y, *tape.gradient(y, [x, w])]

    return [step(tf.constant(X), tf.constant(W)) for _ in range(2)][-1]


def with_a_tape_around() -> Any:
    function = tf.function(program)
    x, w = tf.constant(X), tf.constant(W)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = function(x, w)
        gradients = tape.gradient(y, [x, w])
    return [y, *gradients]


@pytest.mark.parametrize("run", [in_a_session, in_a_function, with_a_tape_around])
def test_values_and_gradients_pass_the_ops_in_between(run: Callable[[], Any]) -> None:
    tool = Fuse()
    with amanda.apply(tool) as scope:
        y, *gradients = map(np.asarray, run())
    assert tool.runs == 2
    np.testing.assert_allclose(y, fused(X, W) + 3, rtol=1e-5)
    for gradient, expected in zip(gradients, GRADIENTS, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert not scope.report
    with amanda.apply(amanda.Tool()):
        np.testing.assert_allclose(np.asarray(run()[0]), np.tanh(X * W) + 3, rtol=1e-5)


def test_what_is_read_is_what_another_tool_has_changed() -> None:
    class Double(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "Mul":
                context.insert_before_op(lambda a: a * 2, inputs=[1])

    for tools in ((Double(), Fuse()), (Fuse(), Double())):
        with amanda.apply(*tools):
            y = tf.function(program)(X, W)
        np.testing.assert_allclose(y, 2 * fused(X, W) + 3, rtol=1e-5)


def test_an_op_that_does_not_come_before_is_an_error_that_says_so() -> None:
    tool = Fuse()
    tool.analyse = None  # type: ignore[assignment]
    wrong = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "Tanh":
            context.replace_op(tool.compute, reads=[(7, 0)])

    wrong.add_inst_for_op(analyse)
    with amanda.apply(wrong), pytest.raises(RoutineError, match="input 0 of op 0x0000000000000007"):
        tf.function(program)(X, W)


def test_eagerly_other_ops_are_not_read() -> None:
    with amanda.apply(Fuse()), pytest.raises(ActionError, match="for graphs"):
        program(tf.constant(X), tf.constant(W))


def test_a_function_is_left_as_it_is_where_only_names_tell_its_gradients() -> None:
    @tf.function
    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = program(x, w)
        return y, tape.gradient(y, w)

    expected_results = step(tf.constant(X), tf.constant(W))
    with amanda.apply(Fuse()) as scope:
        results = step(tf.constant(X), tf.constant(W))
    for result, expected in zip(results, expected_results, strict=True):
        assert np.array_equal(result, expected)
    assert any("replacement of Tanh" in entry.what for entry in scope.report)


def test_functions_whose_ops_were_read_can_go() -> None:
    tool = Fuse()

    def graph_of_called_function() -> Any:
        function, x = tf.function(lambda x: program(x, tf.constant(W))), tf.constant(X)
        with amanda.apply(tool), tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        tape.gradient(y, x)
        return weakref.ref(function.get_concrete_function(x).graph)

    graph = graph_of_called_function()
    gc.collect()
    assert tool.runs == 1
    assert graph() is None


def test_a_replaced_normalisation_has_the_gradients_of_scale_and_offset() -> None:
    def normalised(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        factor = scale * tf.math.rsqrt(variance + 1e-3)
        return x * factor + offset - mean * factor, mean, variance, mean, variance, tf.zeros([0])

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "FusedBatchNormV3":
            context.replace_op(normalised)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    generator = np.random.default_rng(0)
    with tf.Graph().as_default():
        x = tf.constant(generator.random((2, 4, 4, 3)).astype(np.float32))
        parameters = [tf.constant(generator.uniform(0.5, 1.5, 3).astype(np.float32)) for _ in range(4)]
        y = v1.nn.fused_batch_norm(x, *parameters, is_training=False)[0]
        gradients = v1.gradients(tf.reduce_sum(y**2), [x, *parameters[:2]])
        with v1.Session() as session:
            expected_results = session.run([y, *gradients])
            with amanda.apply(tool):
                results = session.run([y, *gradients])
    for result, expected in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_replacement_in_the_slow_path_gives_one_tensor(recwarn: Any) -> None:
    import keras

    layer = keras.layers.Conv2D(2, 1, use_bias=False)
    images = np.ones((3, 4, 4, 2), np.float32)
    layer(images)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "Conv2D":
            context.replace_op(lambda x, kernel, original: original(x, kernel) * 0 + x * 7)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        assert np.array_equal(layer(images), images * 7)

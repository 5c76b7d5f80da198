"""Gradients of gradients past routines, where one graph holds both."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting
from unfused import unfused

import amanda
from amanda.testing import Unchanged

tf1 = tf.compat.v1
X = [0.3, 0.7]


def squared(value):
    return value * value


@amanda.differentiable
def differentiated(value):
    return value * value


def compute(x):
    return tf.reduce_sum(tf.exp(x))


def in_a_function(scope, compute=compute):
    @tf.function
    def gradients(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = compute(x)
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    with scope:
        return [gradient.numpy() for gradient in gradients(tf.constant(X))]


def in_a_called_function(scope):
    return in_a_function(scope, tf.function(compute))


def in_a_session(scope):
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2])
        (first,) = tf.gradients(compute(x), x)
        (second,) = tf.gradients(first, x)
    with tf1.Session(graph=graph) as session, scope:
        return session.run([first, second], {x: X})


MODES = [in_a_function, in_a_called_function, in_a_session]
modes = pytest.mark.parametrize("mode", MODES, ids=[mode.__name__[3:] for mode in MODES])


@modes
@pytest.mark.parametrize("action", ["insert_before_op", "replace_op"])
def test_it_is_said_that_second_gradients_pass_routines_by(mode, action) -> None:
    routine = squared if action == "replace_op" else differentiated
    scope = amanda.apply(inserting(action, "Exp", routine))
    first, _ = mode(scope)
    inner = np.ones(2) if action == "replace_op" else np.exp(np.square(X))
    np.testing.assert_allclose(first, 2 * np.array(X) * inner, rtol=1e-5)
    assert "second gradients of Exp" in [entry.what for entry in scope.report]


@modes
def test_second_gradients_are_computed_on_what_a_routine_gave(mode) -> None:
    """An isolated routine passes them straight through."""
    scope = amanda.apply(inserting("insert_before_op", "Exp", squared))
    for gradient in mode(scope):
        np.testing.assert_allclose(gradient, np.exp(np.square(X)), rtol=1e-5)
    assert not any(entry.what.startswith("second") for entry in scope.report)


@modes
def test_nothing_is_said_where_routines_are_elsewhere(mode) -> None:
    scope = amanda.apply(inserting("insert_before_op", "Tanh", differentiated))
    for gradient in mode(scope):
        np.testing.assert_allclose(gradient, np.exp(X), rtol=1e-5)
    assert not any(entry.what.startswith("second") for entry in scope.report)


def test_gradients_of_gradients_in_a_function_that_was_traced_before_are_as_without() -> None:
    """Names alone tell which op the gradients belong to: no op that was made after them."""

    @tf.function
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(x) * x)
            loss = tf.reduce_sum((inner.gradient(y, x) * x) ** 2)
        return outer.gradient(loss, x)

    x = tf.constant([0.3, -0.7, 1.1])
    with unfused():
        expected = step(x)
        with amanda.apply(Unchanged()):
            np.testing.assert_array_equal(step(x), expected)

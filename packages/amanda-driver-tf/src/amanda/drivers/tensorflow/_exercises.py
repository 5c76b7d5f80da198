"""Programs of one op and its gradient, one for each mode, by which the modes' drivers are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from amanda.backend import Exercise
from tensorflow.python.eager import context

_VALUES = (0.5, -0.25)


def eager_exercise() -> Exercise | None:
    """Return the program for eager mode; None where the program has switched eager mode off."""
    return Exercise(lambda: _run_eagerly(tf.tanh), "Tanh", "Tanh") if _is_eager() else None


def function_exercise() -> Exercise | None:
    """Return the program for functions; None where the program has switched eager mode off."""
    return Exercise(lambda: _run_eagerly(_new_function()), "Tanh", "Tanh") if _is_eager() else None


def session_exercise() -> Exercise:
    """Return the program for sessions."""
    return Exercise(_run_session, "Tanh", "Tanh")


def _new_function() -> Callable[[Any], Any]:
    """Return a function that was never traced: a traced one would be found in a cache."""
    function: Callable[[Any], Any] = tf.function(lambda x: tf.tanh(x))
    return function


def _is_eager() -> bool:
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _run_eagerly(function: Callable[[Any], Any]) -> list[float]:
    """Return a function's result and gradient, outside of a graph that may be under construction."""
    # Not `tf.init_scope`, in which no tape records.
    with context.eager_mode(), tf.device("CPU"):
        x = tf.constant(_VALUES, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [*y.numpy().tolist(), *tape.gradient(y, x).numpy().tolist()]


def _run_session() -> list[float]:
    """Return the op's result and gradient from a session of a graph of its own."""
    graph = tf.Graph()
    with graph.as_default(), tf.device("CPU"):
        x = tf.constant(_VALUES, tf.float64)
        y = tf.tanh(x)
        (gradient,) = tf.gradients(y, x)
    with tf.compat.v1.Session(graph=graph) as session:
        return [number for array in session.run([y, gradient]) for number in array.tolist()]

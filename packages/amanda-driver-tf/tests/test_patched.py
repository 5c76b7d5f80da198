"""What the program puts in the place of TensorFlow's functions while a scope is open stays there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import backprop, context, execute, imperative_grad
from tensorflow.python.eager.polymorphic_function import atomic_function

import amanda


class Seen(amanda.Tool):
    """Types and modules of executions, forward and backward."""

    def __init__(self) -> None:
        self.executions: list[tuple[str, ...]] = []
        for backward in (False, True):
            self.add_inst_for_op(self.see, backward=backward)

    def see(self, context: amanda.OpContext) -> None:
        insert = context.insert_before_backward_op if context.is_backward() else context.insert_before_op
        insert(lambda *_: self.executions.append((str(context.get_forward_op_type()), *context.get_scopes())))


LAYER = keras.layers.Dense(3)
LAYER.build((None, 3))
X = tf.ones((2, 3))


@tf.function
def function(x: Any) -> Any:
    return tf.nn.relu(LAYER(x))


def eager() -> list[Any]:
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(LAYER(X) + tf.nn.relu(X))
    return [y, *tape.gradient(y, LAYER.trainable_variables)]


def slow() -> list[Any]:
    return [tf.raw_ops.Relu(features=X), tf.nn.relu(np.ones(3, np.float32))]


def traced() -> list[Any]:
    with tf.GradientTape() as tape:
        y = function(X)
    return [y, *tape.gradient(y, LAYER.trainable_variables)]


GRAPH = tf.Graph()
with GRAPH.as_default():
    FED = tf.compat.v1.placeholder(tf.float32, (2, 3))
    FETCHED = tf.nn.relu(FED) * 2.0


def session() -> list[Any]:
    with tf.compat.v1.Session(graph=GRAPH) as session:
        return [session.run(FETCHED, {FED: np.ones((2, 3), np.float32)})]


PLACES: list[tuple[Any, str, Callable[[], list[Any]]]] = [
    (pywrap_tfe, "TFE_Py_FastPathExecute", eager),
    (execute, "record_gradient", eager),
    (execute, "execute", slow),
    (imperative_grad, "imperative_grad", eager),
    (keras.layers.Layer, "__call__", eager),
    (backprop.GradientTape, "_push_tape", eager),
    (atomic_function.AtomicFunction, "call_flat", traced),
    (context.Context, "call_function", traced),
    (BaseSession, "_do_call", session),
    (BaseSession, "_call_tf_sessionrun", session),
]


@pytest.mark.parametrize(("holder", "name", "program"), PLACES)
def test_a_patch_that_the_program_makes_in_a_scope_stays(
    holder: Any, name: str, program: Callable[[], list[Any]]
) -> None:
    def same(values: list[Any]) -> bool:
        return all(map(np.array_equal, values, expected))

    unpatched, expected, bare = vars(holder)[name], program(), Seen()
    with amanda.apply(bare):
        program()
    try:
        with amanda.apply(Seen()):
            program()
            original, calls = getattr(holder, name), []

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return original(*args, **kwargs)

            setattr(holder, name, wrapper)
            within = program()
            assert calls
        assert vars(holder)[name] is wrapper
        assert same(within)
        assert same(program())
        tool = Seen()
        calls.clear()
        with amanda.apply(tool):
            later = program()
        assert calls
        assert vars(holder)[name] is wrapper
        assert same(later)
        assert sorted(tool.executions) == sorted(bare.executions)
    finally:
        setattr(holder, name, unpatched)

"""A function that is called at several places of a graph has ops of its own at each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from unfused import unfused

import amanda
from amanda.testing import Unchanged

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)


def differentiated(program: Any) -> Any:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = program(x)
        return tape.gradient(y, x)

    return step


def gradient_function(tape: str) -> Any:
    """The gradient of a function that calls one twice, with the tape inside of it or outside."""
    called = tf.function(lambda x: tf.tanh(x) * x)
    if tape == "inside":
        return tf.function(differentiated(lambda x: called(called(x))))
    return differentiated(tf.function(lambda x: called(called(x))))


@pytest.mark.parametrize("tape", ["inside", "outside"])
@pytest.mark.parametrize("traced", ["traced before", "traced in the scope"])
def test_gradients_of_each_call_read_what_that_call_computed(tape: str, traced: str) -> None:
    with unfused():
        gradient = gradient_function(tape)
        expected = gradient(tf.constant(X))
        if traced == "traced in the scope":
            gradient = gradient_function(tape)
        with amanda.apply(Unchanged()):
            result = gradient(tf.constant(X))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("tape", ["inside", "outside"])
@pytest.mark.parametrize("traced", ["traced before", "traced in the scope"])
def test_each_call_hands_on_to_its_own_backward_ops(tape: str, traced: str) -> None:
    gave: list[Any] = []
    values: list[Any] = []

    def keep(value: Any, run: dict[str, Any]) -> None:
        run["gave"] = value.numpy()
        gave.append(value.numpy())

    def take(gradient: Any, run: dict[str, Any]) -> None:
        values.append(run["gave"])

    gradient = gradient_function(tape)
    if traced == "traced before":
        gradient(tf.constant(X))

    def analyse(context: Any) -> None:
        if context.get_op_type() == "Tanh":
            context.insert_after_op(keep)

    def analyse_backward(context: Any) -> None:
        if context.get_backward_op().type == "TanhGrad":
            context.insert_before_backward_op(take)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(analyse_backward, backward=True)
    with amanda.apply(tool):
        gradient(tf.constant(X))
    np.testing.assert_array_equal(values, gave[::-1])
    assert len(gave) == 2

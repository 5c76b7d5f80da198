"""Each action, in each mode, gives the values and gradients of a program written by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
X = np.ones((2, 4), np.float32)

Loss = Callable[[Any, Any], Any]
Scope = Callable[[], AbstractContextManager[Any]]


def same(value: Any) -> Any:
    return value


def loss(x: Any, weight: Any, before: Any = same, relu: Any = tf.nn.relu, after: Any = same) -> Any:
    """What relu gives is read twice, so that its gradient is a sum."""
    hidden = after(relu(before(tf.matmul(x, weight))))
    return tf.reduce_sum(hidden * hidden)


def product(x: Any, weight: Any, multiply: Callable[[Any], Any]) -> Any:
    return tf.reduce_sum(multiply(tf.nn.relu(tf.matmul(x, weight))))


def in_a_session(program: Loss, scope: Scope) -> list[Any]:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        weight = v1.get_variable("w", initializer=WEIGHT)
        result = program(tf.constant(X), weight)
        fetches = [result, v1.gradients(result, weight)[0]]
        start = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session:
        session.run(start)
        with scope():
            return list(session.run(fetches))


def in_a_function_with_its_tape(program: Loss, scope: Scope) -> list[Any]:
    weight = tf.Variable(WEIGHT)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            result = program(x, weight)
        return result, tape.gradient(result, weight)

    with scope():
        return [value.numpy() for value in step(tf.constant(X))]


def in_a_function_under_a_tape(program: Loss, scope: Scope) -> list[Any]:
    return eagerly(tf.function(program, autograph=False), scope)


def eagerly(program: Loss, scope: Scope) -> list[Any]:
    weight = tf.Variable(WEIGHT)
    with scope():
        with tf.GradientTape() as tape:
            result = program(tf.constant(X), weight)
        return [result.numpy(), tape.gradient(result, weight).numpy()]


MODES = [in_a_session, in_a_function_with_its_tape, in_a_function_under_a_tape, eagerly]


def straight(value: Any, replacement: Any) -> Any:
    """The other's value with the gradient of the first."""
    return value + tf.stop_gradient(replacement - value)


def scaled(factor: float) -> Any:
    """The identity, whose gradient is scaled."""

    @tf.custom_gradient
    def identity(value: Any) -> Any:
        return tf.identity(value), lambda grad: grad * factor

    return identity


@tf.custom_gradient
def relu_with_another_gradient(value: Any) -> Any:
    return tf.nn.relu(value), lambda grad: grad * 7


@amanda.differentiable
def tripled(value: Any) -> Any:
    return value * 3


@amanda.differentiable
def two_and_three_times(first: Any, second: Any) -> Any:
    return first * 2, second * 3


# What is inserted: action, type of op, routine, and what is selected; and the same by hand.
CASES: dict[str, tuple[tuple[Any, ...], Loss]] = {
    "another input": (
        ("insert_before_op", "Relu", lambda value: value * 3),
        lambda x, w: loss(x, w, before=lambda v: straight(v, v * 3)),
    ),
    "another output": (
        ("insert_after_op", "Relu", lambda value: value * 3),
        lambda x, w: loss(x, w, after=lambda v: straight(v, v * 3)),
    ),
    "a differentiable routine before": (
        ("insert_before_op", "Relu", tripled),
        lambda x, w: loss(x, w, before=lambda v: v * 3),
    ),
    "a differentiable routine after": (
        ("insert_after_op", "Relu", tripled),
        lambda x, w: loss(x, w, after=lambda v: v * 3),
    ),
    "a replacement": (
        ("replace_op", "Relu", lambda value: tf.nn.sigmoid(value)),
        lambda x, w: loss(x, w, relu=tf.nn.sigmoid),
    ),
    "a replaced square": (
        ("replace_op", "Mul", lambda x, y: x * y * y),
        lambda x, w: product(x, w, lambda h: h * h * h),
    ),
    "a replaced product with a weight": (
        ("replace_op", "MatMul", lambda x, y: tf.matmul(x, y) * 5),
        lambda x, w: loss(x, w, before=lambda v: v * 5),
    ),
    "differentiable routines at both factors of a square": (
        ("insert_before_op", "Mul", two_and_three_times),
        lambda x, w: product(x, w, lambda h: (h * 2) * (h * 3)),
    ),
    "a differentiable routine at one factor of a square": (
        ("insert_before_op", "Mul", tripled, [0]),
        lambda x, w: product(x, w, lambda h: (h * 3) * h),
    ),
    "another first factor of a square": (
        ("insert_before_op", "Mul", lambda value: value * 2, [0]),
        lambda x, w: product(x, w, lambda h: straight(h, h * 2) * h),
    ),
    "another second factor of a square": (
        ("insert_before_op", "Mul", lambda value: value * 2, [1]),
        lambda x, w: product(x, w, lambda h: h * straight(h, h * 2)),
    ),
    "a gradient before the backward op": (
        ("insert_before_backward_op", "ReluGrad", lambda grad: grad * 7),
        lambda x, w: loss(x, w, after=scaled(7)),
    ),
    "a gradient after the backward op": (
        ("insert_after_backward_op", "ReluGrad", lambda grad: grad * 7),
        lambda x, w: loss(x, w, before=scaled(7)),
    ),
    "a replaced backward op": (
        ("replace_backward_op", "ReluGrad", lambda grad: grad * 7),
        lambda x, w: loss(x, w, relu=relu_with_another_gradient),
    ),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", CASES)
def test_an_action_gives_what_the_program_by_hand_does(name: str, mode: Any) -> None:
    inserted, by_hand = CASES[name]
    expected_results = eagerly(by_hand, nullcontext)
    results = mode(loss, lambda: amanda.apply(inserting(*inserted)))
    for result, expected in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)  # the same operations, in another order

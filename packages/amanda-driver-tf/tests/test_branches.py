"""Gradients in branches read what each op read and gave, in functions and in sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda

tf1 = tf.compat.v1


class InGraph:
    """Control flow of a graph."""

    @staticmethod
    def case(index, branches):
        return tf.switch_case(index, branches)

    @staticmethod
    def loop(turn, x):
        return tf1.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, turn(i, y)), [0, x])[1]

    cond = staticmethod(tf1.cond)


class ByHand:
    """The same, of Python."""

    @staticmethod
    def case(index, branches):
        return branches[int(index)]()

    @staticmethod
    def loop(turn, x):
        for i in range(3):
            x = turn(i, x)
        return x

    @staticmethod
    def cond(test, if_true, if_false):
        return if_true() if test else if_false()


def branch(flow, tanh, mul, x):
    return flow.cond(x < 5, lambda: mul(tanh(x), x), lambda: x)


def nested_branch(flow, tanh, mul, x):
    return flow.cond(x < 5, lambda: flow.cond(x < 6, lambda: mul(tanh(x), x), lambda: x), lambda: x)


def branch_in_a_loop(flow, tanh, mul, x):
    return flow.loop(lambda i, y: flow.cond(i < 2, lambda: mul(tanh(y), x), lambda: tanh(y)), x)


def branches_in_a_loop(flow, tanh, mul, x):
    def turn(i, y):
        return flow.cond(
            i < 2, lambda: flow.cond(i < 1, lambda: mul(tanh(y), x), lambda: tanh(y) + 1), lambda: y * 1.5
        )

    return flow.loop(turn, x)


def loop_in_a_branch(flow, tanh, mul, x):
    return flow.cond(x < 5, lambda: flow.loop(lambda i, y: mul(tanh(y), x), x), lambda: x)


def case_in_a_loop(flow, tanh, mul, x):
    return flow.loop(
        lambda i, y: flow.case(i, [lambda: y + x, lambda: mul(tanh(y), x), lambda: tanh(y) + 1]), x
    )


def in_a_session(program):
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])
        y = program(x)
        (gradient,) = tf.gradients(y, x)
    with tf1.Session(graph=graph) as session:
        return session.run([y, gradient], {x: 0.7})


def with_version_1(program):
    tf1.disable_control_flow_v2()
    try:
        return in_a_session(program)
    finally:
        tf1.enable_control_flow_v2()


def differentiated(program):
    x = tf.constant(0.7)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = program(x)
    return y, tape.gradient(y, x)


def in_a_function(program):
    return tf.function(differentiated)(program)


def outside_a_function(program):
    return differentiated(tf.function(program))


def squared(value):
    return value * value


@tf.custom_gradient
def straight(value):
    """What an isolated routine is to gradients."""
    return squared(value), lambda gradient: gradient


def loop(flow, tanh, mul, x):
    return flow.loop(lambda i, y: mul(tanh(y), x), x)


def through(before: Callable[..., Any] = tf.identity, after: Callable[..., Any] = tf.identity):
    """Functions as they are with a routine before the product's first factor, and one after the other."""
    return (lambda y: after(tf.tanh(y))), (lambda x, y: tf.multiply(before(x), y))


@pytest.mark.parametrize("run", [with_version_1, in_a_session, in_a_function, outside_a_function])
@pytest.mark.parametrize(
    "program", [branch, nested_branch, branch_in_a_loop, loop_in_a_branch, case_in_a_loop]
)
def test_gradients_in_branches_read_what_their_op_read_and_gave(run, program) -> None:
    giving = inserting("insert_after_op", "Tanh", squared)
    reading = inserting("insert_before_op", "Mul", lambda y, x: (squared(y), x))
    with amanda.apply(giving, reading):
        results = run(lambda x: program(InGraph, *through(), x))
    expected = differentiated(lambda x: program(ByHand, *through(straight, straight), x))
    np.testing.assert_allclose(results, expected, rtol=1e-5)


def scan(flow, tanh, mul, x):
    def turn(state, value):
        return mul(tanh(state * x), value)

    values = [0.3, 0.6, 0.9]
    return tf.scan(turn, tf.constant(values), x)[-1] if flow is InGraph else reduce(turn, values, x)


@pytest.mark.parametrize("action", ["insert_before_op", "insert_after_op"])
@pytest.mark.parametrize("program", [scan, branch_in_a_loop, branches_in_a_loop, loop_in_a_branch])
def test_gradients_in_control_flow_of_version_1_go_through_differentiable_routines(program, action) -> None:
    place = action.split("_")[1]
    with amanda.apply(inserting(action, "Tanh", amanda.differentiable(lambda value: value * value))):
        results = with_version_1(lambda x: program(InGraph, tf.tanh, tf.multiply, x))
    routine = {"before": lambda y: tf.tanh(squared(y)), "after": lambda y: squared(tf.tanh(y))}[place]
    expected = differentiated(lambda x: program(ByHand, routine, tf.multiply, x))
    np.testing.assert_allclose(results, expected, rtol=1e-5)


@pytest.mark.parametrize("run", [in_a_session, in_a_function, outside_a_function])
def test_gradients_in_branches_go_through_differentiable_routines(run) -> None:
    with amanda.apply(
        inserting("insert_after_op", "Tanh", amanda.differentiable(lambda value: value * value))
    ):
        results = run(lambda x: case_in_a_loop(InGraph, *through(), x))
    expected = differentiated(lambda x: case_in_a_loop(ByHand, *through(after=squared), x))
    np.testing.assert_allclose(results, expected, rtol=1e-5)


@pytest.mark.parametrize("run", [in_a_session, in_a_function])
def test_gradients_in_loops_read_what_an_identity_and_its_reader_were_given(run) -> None:
    reading = inserting("insert_before_op", "Mul", lambda y, x: (squared(y), x))

    def marked(y, x):
        return tf.identity(y, name="marked") * x

    def only_marked(context) -> None:
        if context.get_op_type() == "Identity" and context.get_op().name.endswith("marked"):
            context.insert_after_op(squared)

    giving = amanda.Tool()
    giving.add_inst_for_op(only_marked, require_outputs=True)
    for tools, after in ([giving], straight), ([giving, reading], lambda y: straight(straight(y))):
        with amanda.apply(*tools):
            results = run(lambda x: loop(InGraph, tf.tanh, marked, x))
        expected = differentiated(lambda x: loop(ByHand, *through(after), x))  # noqa: B023
        np.testing.assert_allclose(results, expected, rtol=1e-5)

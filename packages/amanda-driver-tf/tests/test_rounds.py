"""Each round of a loop hands on to its own backward routines, in functions and in sessions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda

tf1 = tf.compat.v1
inside = pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])


class Handing(amanda.Tool):
    """Hands what Tanh gave on to its backward op, beside what that op computes."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context) -> None:
        if context.get_op_type() == "Tanh":
            context.insert_before_op(self.begin)
            context.insert_after_op(self.keep)

    def analyse_backward(self, context) -> None:
        if context.get_backward_op().type == "TanhGrad":
            context.insert_before_backward_op(self.take)

    def begin(self, value, run) -> None:
        assert not run
        run["given"] = value

    def keep(self, value, run) -> None:
        run["gave"] = value
        np.testing.assert_allclose(value, np.tanh(run["given"]), rtol=1e-5)
        self.forward.append(float(value))

    def take(self, gradient, run) -> None:
        self.backward.append(float(run["gave"]))


def simple(x):
    for _ in tf.range(4):
        x = tf.tanh(x) * 1.5
    return x


def nested(x):
    for i in tf.range(3):
        for _ in tf.range(i):
            x = tf.tanh(x) * 1.5
        x = x * 1.1
    return x


def called(x):
    for _ in tf.range(3):
        x = turned(x)
    return x


@tf.function
def turned(x):
    return tf.tanh(x) * 1.5


def branching(x):
    for i in tf.range(5):
        x = tf.tanh(x) * 1.5 if tf.equal(i % 2, 1) else x * 1.1
    return x


def after_another(x):
    for _ in tf.range(2):
        x = x * 1.2
    return simple(x)


PROGRAMS = [(simple, 4), (nested, 3), (called, 3), (branching, 2), (after_another, 4)]
programs = pytest.mark.parametrize(("program", "count"), PROGRAMS, ids=[one.__name__ for one, _ in PROGRAMS])


@inside
@programs
def test_a_round_hands_on_to_its_own_gradient_in_a_function(program, count, inside) -> None:
    compute = tf.function(program)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compute(x)
        return tape.gradient(y, x)

    x = tf.constant(0.3)
    vanilla = gradient(x)
    tool = Handing()
    with amanda.apply(tool):
        found = (tf.function(gradient) if inside else gradient)(x)
    assert found == vanilla
    assert len(set(tool.forward)) == count
    assert tool.backward == tool.forward[::-1]


@programs
def test_a_round_hands_on_to_its_own_gradient_in_a_session(program, count) -> None:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])
        (gradient,) = tf.gradients(tf.autograph.to_graph(program)(x), x)
    tool = Handing()
    with tf1.Session(graph=graph) as session:
        vanilla = session.run(gradient, {x: 0.3})
        with amanda.apply(tool):
            assert session.run(gradient, {x: 0.3}) == vanilla
    assert len(set(tool.forward)) == count
    assert tool.backward == tool.forward[::-1]


@inside
def test_rounds_that_run_at_the_same_time_are_told_apart(inside) -> None:
    """No round reads what the one before gave, so TensorFlow need not keep their order."""
    values = tf.linspace(0.1, 0.9, 16)

    def total(values):
        found = tf.constant(0.0)
        for i in tf.range(16):
            tf.autograph.experimental.set_loop_options(parallel_iterations=8)
            found += tf.tanh(values[i])
        return found

    compute = tf.function(total)

    def gradient(values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            y = compute(values)
        return tape.gradient(y, values)

    tool = Handing()
    squared = amanda.Tool()
    squared.add_inst_for_op(
        lambda context: (
            context.insert_before_op(amanda.differentiable(lambda x: x * x))
            if context.get_op_type() == "Tanh"
            else None
        )
    )
    with amanda.apply(squared, tool):
        found = (tf.function(gradient) if inside else gradient)(values)
    np.testing.assert_allclose(found, 2 * values * (1 - np.tanh(values**2) ** 2), rtol=1e-5)
    assert sorted(tool.backward) == sorted(tool.forward)
    assert len(set(tool.forward)) == 16


def test_rounds_of_second_gradients_are_told_apart() -> None:
    compute = tf.function(simple)

    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = compute(x)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    x = tf.constant(0.3)
    vanilla = tf.function(second)(x)
    compute = tf.function(simple)
    tool = Handing()
    with amanda.apply(tool):
        assert tf.function(second)(x) == vanilla
    assert len(tool.forward) == 4
    assert set(tool.backward) == set(tool.forward)


def test_it_is_said_where_rounds_share_what_is_handed_on() -> None:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])
        tf1.disable_control_flow_v2()
        try:
            y = tf1.while_loop(lambda y: y < 10.0, lambda y: tf.tanh(y) + y, [x])
        finally:
            tf1.enable_control_flow_v2()
        z = tf.tanh(x)
    tool = Handing()
    with tf1.Session(graph=graph) as session:
        with amanda.apply(tool) as scope:
            session.run(z, {x: 0.3})
        assert not scope.report
        tool = inserting("insert_before_op", "Tanh", lambda value, run: run.update(value=value))
        with amanda.apply(tool) as scope:
            session.run(y, {x: 0.3})
    (entry,) = scope.report
    assert "`run`" in entry.what
    assert "control flow of version 1" in entry.reason

"""Each round of a loop hands on to its own backward routines, in functions and in sessions."""

from __future__ import annotations

from collections.abc import Iterator

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
programs = pytest.mark.parametrize(
    ("program", "count"), PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS]
)


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
        result = (tf.function(gradient) if inside else gradient)(x)
    assert result == vanilla
    assert len(set(tool.forward)) == count
    assert tool.backward == tool.forward[::-1]


@pytest.fixture(params=["version 1", "version 2"])
def control_flow(request) -> Iterator[None]:
    """Of that version, in graphs that are made for sessions."""
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if request.param == "version 2" else tf1.disable_control_flow_v2)()
    yield
    (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()


@programs
@pytest.mark.usefixtures("control_flow")
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
        sum_of_rounds = tf.constant(0.0)
        for i in tf.range(16):
            tf.autograph.experimental.set_loop_options(parallel_iterations=8)
            sum_of_rounds += tf.tanh(values[i])
        return sum_of_rounds

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
        result = (tf.function(gradient) if inside else gradient)(values)
    np.testing.assert_allclose(result, 2 * values * (1 - np.tanh(values**2) ** 2), rtol=1e-5)
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


def squared(value):
    return value * value


@tf.custom_gradient
def straight(value):
    """What an isolated routine is to gradients."""
    return squared(value), lambda gradient: gradient


differentiated = amanda.differentiable(lambda value: value * value)


def by_hand(before=tf.identity, after=tf.identity, compute=tf.tanh):
    """Value and gradient of a loop in a loop, computed eagerly."""
    x = tf.constant(0.7)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(2):
            for _ in range(3):
                y = after(compute(before(y))) * x
            y = y + x
    return y, tape.gradient(y, x)


@pytest.mark.parametrize(
    ("action", "kind", "routine", "places"),
    [
        ("insert_before_op", "Tanh", differentiated, {"before": squared}),
        ("insert_after_op", "Tanh", differentiated, {"after": squared}),
        ("insert_before_op", "Tanh", squared, {"before": straight}),
        ("insert_after_op", "Tanh", squared, {"after": straight}),
        ("insert_before_op", "Mul", lambda y, x: (y * y, x), {"after": straight}),
        ("replace_op", "Tanh", tf.sin, {"compute": tf.sin}),
    ],
    ids=["before", "after", "isolated before", "isolated after", "isolated before a reader", "instead"],
)
@pytest.mark.usefixtures("control_flow")
def test_gradients_go_through_routines_in_loops_of_a_session(action, kind, routine, places) -> None:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])

        def inner(_, y):
            return tf1.while_loop(lambda j, _: j < 3, lambda j, y: (j + 1, tf.tanh(y) * x), [0, y])[1]

        _, y = tf1.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, inner(i, y) + x), [0, x])
        (gradient,) = tf.gradients(y, x)
    with tf1.Session(graph=graph) as session:
        vanilla = session.run([y, gradient], {x: 0.7})
        with amanda.apply(inserting(action, kind, routine)):
            results = session.run([y, gradient], {x: 0.7})
        assert session.run([y, gradient], {x: 0.7}) == vanilla
    np.testing.assert_allclose(results, by_hand(**places), rtol=1e-5)


def test_rounds_of_version_1_that_run_at_the_same_time_are_told_apart() -> None:
    tf1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = tf1.placeholder(tf.float32, [8])
            y = tf.map_fn(tf.tanh, x)
            (gradient,) = tf.gradients(y, x)
    finally:
        tf1.enable_control_flow_v2()
    tool = Handing()
    inputs = np.linspace(0.1, 0.9, 8)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(gradient, {x: inputs})
    assert sorted(tool.forward) == sorted(tool.backward)
    np.testing.assert_allclose(sorted(tool.forward), np.tanh(inputs), rtol=1e-5)


@pytest.mark.usefixtures("control_flow")
def test_a_loop_of_a_session_is_differentiated_twice_over() -> None:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])
        y = tf1.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y) * x), [0, x])[1]
        gradients = [*tf.gradients(y, x), *tf.gradients(2 * y, x)]
    with tf1.Session(graph=graph) as session, amanda.apply(inserting("insert_after_op", "Tanh", squared)):
        expected, gradient_in_scope = session.run(gradients, {x: 0.7})
    assert gradient_in_scope == 2 * expected


@pytest.mark.usefixtures("control_flow")
def test_gradients_of_a_branch_in_a_loop_read_what_the_op_gave() -> None:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [])

        def turned(i, y):
            return i + 1, tf1.cond(i < 5, lambda: tf.tanh(y) * x, lambda: y)

        y = tf1.while_loop(lambda i, _: i < 3, turned, [0, x])[1]
        (gradient,) = tf.gradients(y, x)
    with tf1.Session(graph=graph) as session, amanda.apply(inserting("insert_after_op", "Tanh", squared)):
        result = session.run(gradient, {x: 0.7})
    x = tf.constant(0.7)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(3):
            y = straight(tf.tanh(y)) * x
    np.testing.assert_allclose(result, tape.gradient(y, x), rtol=1e-5)

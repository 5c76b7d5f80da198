"""Routines in the condition of a loop run whenever the loop asks for it, in functions and in sessions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda

tf1 = tf.compat.v1


def doubling(x):
    return tf.while_loop(
        lambda y: tf.reduce_sum(tf.matmul(y, y)) < 100.0, lambda y: [y * 2.0], [x], parallel_iterations=1
    )[0]


def doubling_in_a_call(x):
    @tf.function
    def small(y):
        return tf.cond(y[0, 0] > 0.0, lambda: tf.reduce_sum(tf.matmul(y, y)) < 100.0, lambda: False)

    return tf.while_loop(small, lambda y: [y * 2.0], [x])[0]


def doubling_twice(x):
    return tf.while_loop(
        lambda i, y: i < 2, lambda i, y: [i + 1, doubling(y) / (2.0 - tf.cast(i, tf.float32))], [0, x]
    )[1]


def in_a_function(program):
    return tf.function(program)(tf.ones([2, 2])).numpy()


def differentiated(program):
    x = tf.ones([2, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(program)(x)
    return np.stack([y, tape.gradient(y, x)])


def in_a_session(program):
    with tf.Graph().as_default() as graph:
        y = program(tf.ones([2, 2]))
    with tf1.Session(graph=graph) as session:
        return session.run(y)


def with_version_1(program):
    tf1.disable_control_flow_v2()
    try:
        return in_a_session(program)
    finally:
        tf1.enable_control_flow_v2()


RUNS = [in_a_function, differentiated, in_a_session, with_version_1]
EVALUATIONS = {doubling: 3, doubling_in_a_call: 3, doubling_twice: 5}


def counting(action: str, mark=lambda func: func, **select):
    counts: list[int] = []

    def count(*values) -> None:
        counts.append(len(values))

    return counts, inserting(action, "MatMul", mark(count), **select)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("program", EVALUATIONS)
def test_observers_in_a_condition_run_at_each_of_its_evaluations(run, program) -> None:
    expected = run(program)
    counts, tool = counting("insert_after_op", amanda.observer)
    with amanda.apply(tool):
        np.testing.assert_array_equal(run(program), expected)
    assert counts == [1] * EVALUATIONS[program]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("action", ["insert_before_op", "insert_after_op"])
def test_routines_in_a_condition_run_that_are_given_nothing(run, action) -> None:
    select = {"inputs": []} if action == "insert_before_op" else {"outputs": []}
    counts, tool = counting(action, **select)
    with amanda.apply(tool):
        run(doubling)
    assert counts == [0, 0, 0]


ACTIONS = {
    "insert_before_op": lambda x, y: (x * 2.0, y),
    "insert_after_op": lambda product: product * 2.0,
    "replace_op": lambda x, y: tf.matmul(x, y) * 2.0,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("mark", [lambda func: func, amanda.traceable], ids=["runtime", "traceable"])
def test_a_changed_condition_ends_the_loop(run, action, mark) -> None:
    evaluations, counts = counting("insert_after_op", amanda.observer)
    with amanda.apply(inserting(action, "MatMul", mark(ACTIONS[action])), counts):
        result = run(lambda x: doubling(x * 2.0))
    assert len(evaluations) == 2  # 2 * 32, 2 * 128
    np.testing.assert_array_equal(result[0] if run is differentiated else result, np.full((2, 2), 4.0))


def test_the_condition_of_a_map_is_seen() -> None:
    dtypes: list[str] = []

    def analysis(context) -> None:
        if context.get_op().type in ("Less", "LogicalAnd"):
            context.insert_after_op(amanda.observer(lambda value: dtypes.append(value.dtype.name)))

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis, require_outputs=True)
    with amanda.apply(tool):
        tf.function(lambda x: tf.map_fn(lambda element: element + 1.0, x))(tf.ones([3]))
    assert dtypes == ["bool"] * 12  # two comparisons and what joins them, before each round and at the end

"""Control flow of both versions runs in a scope as it does outside."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


@pytest.fixture(params=["version 1", "version 2"])
def control_flow(request):
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if request.param == "version 2" else tf1.disable_control_flow_v2)()
    yield request.param
    (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()


def same_in_scope(graph, fetches, feeds, tool, repeat=2):
    with tf1.Session(graph=graph) as session:
        vanilla = session.run(fetches, feeds)
        with amanda.apply(tool):
            for _ in range(repeat):
                inside = session.run(fetches, feeds)
                np.testing.assert_equal(inside, vanilla)
        np.testing.assert_equal(session.run(fetches, feeds), vanilla)
    return vanilla


@pytest.mark.parametrize("predicate", [True, False])
def test_a_conditional_takes_the_same_branch(graph, everywhere, control_flow, predicate) -> None:
    p = tf1.placeholder(tf.bool, [])
    x = tf1.placeholder(tf.float32, [2])
    y = tf1.cond(p, lambda: tf.exp(x) + 1.0, lambda: tf.sin(x) * tf.constant(3.0))
    (grad,) = tf.gradients(y, x)
    same_in_scope(graph, [y, grad, y + 1.0], {p: predicate, x: [0.5, 1.5]}, everywhere)
    assert any("Exp" in name or "Sin" in name for name in everywhere.ran), everywhere.ran


def test_a_loop_runs_its_routines_in_every_iteration(graph, everywhere, control_flow) -> None:
    x = tf1.placeholder(tf.float32, [2])
    w = tf.constant([2.0, 3.0])
    _, y = tf1.while_loop(lambda i, _: i < 5, lambda i, v: (i + 1, tf.sin(v * w)), [tf.constant(0), x])
    same_in_scope(graph, y, {x: [0.5, 1.5]}, everywhere, repeat=1)
    assert any(count == 5 and name.endswith("Sin") for name, count in everywhere.ran.items()), everywhere.ran


def test_gradients_go_through_a_loop(graph, everywhere, control_flow) -> None:
    x = tf1.placeholder(tf.float32, [2])
    w = tf1.get_variable("w", initializer=[2.0, 3.0], use_resource=True)
    _, y = tf1.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, tf.sin(v * w)), [tf.constant(0), x])
    grads = tf.gradients(tf.reduce_sum(y), [x, w])
    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        vanilla = session.run([y, *grads], {x: [0.5, 1.5]})
        with amanda.apply(everywhere):
            inside = session.run([y, *grads], {x: [0.5, 1.5]})
    np.testing.assert_equal(inside, vanilla)


def test_a_loop_in_a_conditional(graph, everywhere, control_flow) -> None:
    p = tf1.placeholder(tf.bool, [])
    x = tf1.placeholder(tf.float32, [2])

    def loop():
        return tf1.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * 2.0 + x), [tf.constant(0), x])[1]

    y = tf1.cond(p, loop, lambda: x)
    for predicate in (True, False):
        same_in_scope(graph, y, {p: predicate, x: [0.5, 1.5]}, everywhere)


def test_a_loop_in_a_conditional_in_a_loop_has_gradients(graph, everywhere, control_flow) -> None:
    x = tf1.placeholder(tf.float32, [2])

    def loop(v):
        return tf1.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, v * v), [tf.constant(0), v])[1]

    def body(i, v):
        return i + 1, tf1.cond(tf.equal(i % 2, 0), lambda: loop(v) * v, lambda: v * 0.5)

    y = tf1.while_loop(lambda i, _: i < 3, body, [tf.constant(0), x])[1]
    same_in_scope(graph, [y, *tf.gradients(y, x)], {x: [0.5, 1.5]}, everywhere)


def test_a_conditional_in_nested_loops(graph, everywhere, control_flow) -> None:
    x = tf1.placeholder(tf.float32, [])

    def inner(i, v):
        return i + 1, tf1.cond(tf.equal(i % 2, 0), lambda: v + x, lambda: v * 1.5)

    def outer(i, v):
        return i + 1, tf1.while_loop(lambda j, _: j < 3, inner, [tf.constant(0), v])[1]

    y = tf1.while_loop(lambda i, _: i < 2, outer, [tf.constant(0), x])[1]
    same_in_scope(graph, y, {x: 0.5}, everywhere)


def test_observers_in_loops_and_branches(graph, control_flow) -> None:
    class Seen(amanda.Tool):
        def __init__(self):
            self.values = []
            self.add_inst_for_op(self.analyse, require_outputs=True)

        def analyse(self, context):
            if context.get_op_type() == "Sin":
                context.insert_after_op(self.see)

        @amanda.observer
        def see(self, value):
            self.values.append(float(value))

    tool = Seen()
    x = tf1.placeholder(tf.float32, [])
    y = tf1.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, tf.sin(v)), [tf.constant(0), x])[1]
    z = tf1.cond(x > 0, lambda: tf.cos(x), lambda: tf.sin(x))
    same_in_scope(graph, [y, z], {x: 0.5}, tool, repeat=1)
    expected = [np.sin(0.5), np.sin(np.sin(0.5)), np.sin(np.sin(np.sin(0.5)))]
    assert sorted(tool.values, reverse=True) == pytest.approx(expected)  # iterations overlap


def test_what_a_loop_ends_on_is_given_values(graph, control_flow) -> None:
    """TensorFlow's loop optimizer fails where a predicate reads a later output of a node."""
    tool = amanda.Tool()
    counts = []

    def analyse(context):
        if context.get_op_type() == "Less":
            context.insert_before_op(lambda *values: counts.append(len(values)))

    tool.add_inst_for_op(analyse)
    x = tf1.placeholder(tf.float32, [2])
    y = tf1.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, tf.sin(v)), [tf.constant(0), x])[1]
    same_in_scope(graph, [y, *tf.gradients(y, x)], {x: [0.5, 1.5]}, tool, repeat=1)
    assert counts[:5] == [2] * 5


def test_what_comes_round_again_to_a_merge_is_reported(graph) -> None:
    tf1.disable_control_flow_v2()
    try:
        y = tf1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])
    finally:
        tf1.enable_control_flow_v2()
    calls = []
    tool = amanda.Tool()

    def analysis(context) -> None:
        if context.get_op().type == "Merge":
            context.insert_before_op(lambda *values: calls.append(values))

    tool.add_inst_for_op(analysis)
    with tf1.Session(graph=graph) as session, amanda.apply(tool) as scope:
        assert session.run(y) == 3
    assert len(calls) == 1
    assert [entry.what for entry in scope.report] == ["routines before while/Merge"]


@pytest.mark.parametrize("predicate", [True, False])
def test_routines_before_a_merge_get_what_either_branch_gives(graph, predicate) -> None:
    tf1.disable_control_flow_v2()
    try:
        p = tf1.placeholder(tf.bool, [])
        y = tf1.cond(p, lambda: tf.constant(2.0), lambda: tf.constant(3.0))
    finally:
        tf1.enable_control_flow_v2()
    tool = amanda.Tool()

    def analysis(context) -> None:
        if context.get_op().type == "Merge":
            context.insert_before_op(lambda value: value * 10.0)

    tool.add_inst_for_op(analysis)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        assert session.run(y, {p: predicate}) == (20.0 if predicate else 30.0)


class Noting(amanda.Tool):
    """Notes what ops give and read; as plain routines, or as observers that share nodes."""

    def __init__(self, shares):
        super().__init__()
        self.records, self.calls, self.shares = [], 0, shares
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        see = self.see if self.shares else self.see_alone
        for point, insert in (("before", context.insert_before_op), ("after", context.insert_after_op)):
            insert(see, site=(point, context.get_op().name))

    def see_alone(self, *values, site):
        self.note(values, site)

    @amanda.observer
    def see(self, *values, site):
        self.calls += 1  # at what enters a loop, which is alone
        self.note(values, site)

    @amanda.gathered(see)
    def see_all(self, executions):
        self.calls += 1
        for observation in executions:
            self.note(observation.values, **observation.kwargs)

    def note(self, values, site):
        lists = [None if value is None else np.asarray(value).tolist() for value in values]
        self.records.append((*site, repr(lists)))


def test_observers_at_control_flow_share_a_node_in_each_round_and_see_what_routines_of_their_own_see(graph):
    tf1.disable_control_flow_v2()
    try:
        x = tf1.placeholder(tf.float32, [])

        def body(i, v):
            return i + 1, tf1.cond(tf.equal(i % 2, 0), lambda: tf.sin(v) + x, lambda: tf.cos(v))

        y = tf1.while_loop(lambda i, _: i < 6, body, [tf.constant(0), x])[1]
        fetches = [y, *tf.gradients(y, x)]
    finally:
        tf1.enable_control_flow_v2()
    alone, shared = Noting(False), Noting(True)
    for tool in (alone, shared):
        same_in_scope(graph, fetches, {x: 0.5}, tool, repeat=1)
    assert sorted(alone.records) == sorted(shared.records)
    assert any("Switch" in name for _, name, _ in shared.records)
    assert shared.calls < len(shared.records) / 5

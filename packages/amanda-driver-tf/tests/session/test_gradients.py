"""Gradient operations belong to the operations whose gradients they compute."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


class Pairs(amanda.Tool):
    """Which forward operation each backward operation is given with."""

    def __init__(self):
        self.pairs = {}
        self.ran = []
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context):
        name = context.get_backward_op().name
        self.pairs[name] = context.get_op().name
        context.insert_before_backward_op(lambda *grads: self.ran.append(name))


def network():
    x = tf1.placeholder(tf.float32, [2, 3], name="x")
    w = tf1.get_variable("w", [3, 3], initializer=tf1.ones_initializer(), use_resource=True)
    with tf1.name_scope("block"):
        y = tf.nn.relu(tf.matmul(x, w, name="first"), name="relu")
        z = tf.matmul(y, w, name="second")
    _, second = tf.split(z, [1, 2], axis=1, name="split")
    loss = tf.reduce_sum(tf.exp(second, name="exp") + y[:, :2], name="loss")
    return x, w, loss


EXPECTED = {
    "block/first_grad/MatMul_1": "block/first",
    "block/second_grad/MatMul": "block/second",
    "block/second_grad/MatMul_1": "block/second",
    "block/relu_grad/ReluGrad": "block/relu",
    "exp_grad/mul": "exp",
    "split_grad/concat": "split",
    "AddN": "block/relu",
    "zeros_like": "split",
}


@pytest.mark.parametrize("scope", ["gradients", "train/gradients", "my_own"])
def test_gradients_built_before_the_scope(graph, scope) -> None:
    x, w, loss = network()
    outer, _, name = scope.rpartition("/")
    with tf1.name_scope(f"{outer}/") if outer else tf1.name_scope(None):
        grads = tf1.gradients(loss, [w], name=name)
    tool = Pairs()
    with tf1.Session(graph=graph) as session:
        session.run(w.initializer)
        with amanda.apply(tool) as scope_:
            session.run(grads, {x: np.ones([2, 3])})
    for backward, forward in EXPECTED.items():
        assert tool.pairs[f"{scope}/{backward}"] == forward, tool.pairs
    assert f"{scope}/AddN" in tool.ran
    assert not [entry for entry in scope_.report if "names" in entry.reason]


def test_gradients_of_an_imported_graph_are_told_by_names(graph) -> None:
    _, w, loss = network()
    fetch = [grad.name for grad in tf1.gradients(loss, [w])]
    definition = graph.as_graph_def()
    with tf.Graph().as_default() as imported, tf1.Session() as session:
        tf1.import_graph_def(definition, name="")
        tool = Pairs()
        session.run("w/Assign")
        vanilla = session.run(fetch, {"x:0": np.ones([2, 3])})
        with amanda.apply(tool) as scope:
            np.testing.assert_equal(session.run(fetch, {"x:0": np.ones([2, 3])}), vanilla)
        assert imported.get_operation_by_name("exp")._original_op is None
    for backward, forward in EXPECTED.items():
        assert tool.pairs[f"gradients/{backward}"] == forward
    assert [entry for entry in scope.report if "names" in entry.reason]


def test_recorded_gradients_beside_imported_ones(graph) -> None:
    _, w, loss = network()
    (grad,) = tf1.gradients(loss, [w])
    definition = graph.as_graph_def()
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.import_graph_def(definition, name="")
        x = tf1.placeholder(tf.float32, [3, 3])
        (recorded,) = tf1.gradients(tf.sin(x, name="sine"), x, name="own")
        tool = Pairs()
        session.run("w/Assign")
        with amanda.apply(tool) as scope:
            session.run([recorded, grad.name], {"x:0": np.ones([2, 3]), x: np.ones([3, 3])})
    assert tool.pairs["own/sine_grad/mul"] == "sine"
    assert tool.pairs["gradients/exp_grad/mul"] == "exp"
    assert len([entry for entry in scope.report if "names" in entry.reason]) == 1


def test_gradients_of_gradients_belong_to_the_first_operation(graph) -> None:
    x = tf1.placeholder(tf.float32, [], name="x")
    (once,) = tf1.gradients(tf.sin(x, name="sin"), x)
    (twice,) = tf1.gradients(once, x, name="again")
    tool = Pairs()
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        assert session.run(twice, {x: 1.0}) == pytest.approx(-np.sin(1.0))
    assert set(tool.pairs.values()) == {"sin"}


def test_custom_gradients(graph) -> None:
    @tf.custom_gradient
    def clipped(value):
        return tf.identity(value, name="through"), lambda grad: tf.clip_by_value(grad, -1.0, 1.0)

    x = tf1.placeholder(tf.float32, [], name="x")
    (grad,) = tf1.gradients(clipped(x * 3.0) * 5.0, x)
    tool = Pairs()
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        assert session.run(grad, {x: 1.0}) == 3.0
    assert any("clip" in name for name in tool.pairs)


def test_routines_at_backward_ops_that_no_gradient_enters_are_reported(graph) -> None:
    x, y = tf1.placeholder(tf.float32, [None, 2]), tf1.placeholder(tf.float32, [None])
    gradient = tf.gradients(x + y, y)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_before_backward_op(lambda *gradients: None), backward=True)
    with tf1.Session(graph=graph) as session, amanda.apply(tool) as scope:
        session.run(gradient, {x: [[1.0, 2.0]], y: [1.0, 2.0]})
    assert [entry.what for entry in scope.report] == ["routines before backward ops that no gradient enters"]

"""What a scope leaves of itself: nothing that Python shows."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

import amanda
from amanda.drivers.tensorflow.session import _copies

tf1 = tf.compat.v1


def train_graph():
    x = tf1.placeholder(tf.float32, [None, 3], name="x")
    w = tf1.get_variable("w", [3, 2], initializer=tf1.ones_initializer(), use_resource=True)
    r = tf1.get_variable("r", [2], initializer=tf1.ones_initializer(), use_resource=False)
    noise = tf1.random_uniform([2], seed=1)
    with tf1.control_dependencies([noise]):
        y = tf.matmul(x, w) + r
    loss = tf.reduce_mean(tf.square(y) + noise, name="loss")
    return loss, tf1.train.AdamOptimizer().minimize(loss), tf1.global_variables_initializer()


def visible_facts(graph):
    return (
        [op.name for op in graph.get_operations()],
        graph.as_graph_def(),
        graph.as_graph_def(add_shapes=True),
        graph.version,
        {key: [str(item) for item in graph.get_collection(key)] for key in graph.get_all_collection_keys()},
        tf1.train.export_meta_graph(graph=graph),
        {tensor.name: sorted(reader.name for reader in tensor.consumers())
         for op in graph.get_operations() for tensor in op.outputs},
        {op.name: sorted(reader.name for reader in op._control_outputs) for op in graph.get_operations()},
    )  # fmt: skip


def test_the_graph_shows_what_it_showed(graph, everywhere) -> None:
    loss, train, init = train_graph()
    before = visible_facts(graph)
    with tf1.Session(graph=graph) as session:
        session.run(init)
        with amanda.apply(everywhere):
            session.run([loss, train], {"x:0": np.ones([4, 3])})
            assert visible_facts(graph) == before
        assert visible_facts(graph) == before
        assert session.graph_def == graph.as_graph_def()


@pytest.mark.parametrize("mark", [amanda.traceable, lambda routine: routine])
def test_functions_of_copies_are_not_shown(graph, mark) -> None:
    inner = tf.function(lambda value: value * 2.0)
    tool = amanda.Tool()

    def analyse(context):
        if context.get_op_type() == "Sin":
            context.insert_before_op(mark(lambda value: inner(value) + 1.0))

    tool.add_inst_for_op(analyse)
    y = tf.function(tf.sin)(tf.constant(1.0)) + tf.sin(1.0)
    before = visible_facts(graph)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        assert session.run(y) == pytest.approx(2 * np.sin(3.0))
    assert visible_facts(graph) == before


def test_a_graph_can_be_built_on_and_imported_into(graph, everywhere) -> None:
    loss, train, init = train_graph()
    definition = graph.as_graph_def()
    with tf1.Session(graph=graph) as session:
        session.run(init)
        with amanda.apply(everywhere):
            session.run([loss, train], {"x:0": np.ones([4, 3])})
        count = len(graph.get_operations())
        tf1.import_graph_def(definition, name="again")
        assert len(graph.get_operations()) == count + len(definition.node)
        grads = tf.gradients(loss, tf1.trainable_variables())
        with amanda.apply(everywhere):
            session.run(grads, {"x:0": np.ones([4, 3])})
        session.run(grads, {"x:0": np.ones([4, 3])})
        assert not [name for name in everywhere.counts if "amanda" in name]


def test_classes_are_as_they_were(graph, everywhere) -> None:
    holders = (BaseSession, BaseSession._Callable, ops.Graph, ops.Operation, ops.SymbolicTensor)
    before = [dict(vars(holder)) for holder in holders]
    with tf1.Session(graph=graph) as session, amanda.apply(everywhere):
        session.run(tf.constant(1.0) + 1.0)
    assert [dict(vars(holder)) for holder in holders] == before


def test_readers_of_what_copies_read_are_hidden_in_that_graph_alone() -> None:
    before = dict(vars(ops.SymbolicTensor)), dict(vars(ops.Operation))
    graph = tf.Graph()
    with graph.as_default():
        noise, constant = tf1.random_uniform([2], seed=1), tf.constant(1.0)
        with tf1.control_dependencies([noise.op]):
            y = tf.exp(constant)
        z = tf.exp(noise)
        with tf1.Session() as session, amanda.apply(inserting("insert_before_op", "Exp", lambda x: x)):
            session.run([y, z])
        later = tf.sin(noise)
    assert [op.name for op in noise.consumers()] == [z.op.name, later.op.name]
    assert noise.op._control_outputs == [y.op]
    assert noise.op == y.op.control_inputs[0]
    assert isinstance(noise.op, tf.Operation)
    assert type(noise.op).__name__ == "Operation"
    assert type(z.op) is ops.Operation
    assert (dict(vars(ops.SymbolicTensor)), dict(vars(ops.Operation))) == before
    died = weakref.ref(graph)
    del graph, noise, constant, y, z, later, session
    gc.collect()
    assert died() is None


def test_nothing_is_copied_where_nothing_is_inserted(graph) -> None:
    tool = amanda.Tool()
    names = []
    tool.add_inst_for_op(lambda context: names.append(context.get_op().name))
    y = tf.exp(tf.constant(1.0), name="y")
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(y)
        session.run(y)
    assert names == ["Const", "y"]
    assert not hasattr(graph._as_graph_def, "functions")


def test_routines_may_make_variables_and_operations(graph) -> None:
    class Scaling(amanda.Tool):
        def __init__(self):
            self.add_inst_for_op(self.analyse)

        def analyse(self, context):
            if context.get_op_type() == "Exp":
                self.scale = tf.Variable(2.0)
                assert tf.executing_eagerly()
                context.insert_before_op(self.scaled)

        def scaled(self, value):
            self.scale.assign_add(1.0)
            variable = tf.Variable(value)
            return variable * self.scale

    x = tf1.placeholder(tf.float32, [])
    v = tf1.get_variable("v", initializer=1.0)
    y = tf.exp(x) + v
    before = visible_facts(graph)
    tool = Scaling()
    with tf1.Session(graph=graph) as session:
        session.run(v.initializer)
        with amanda.apply(tool):
            assert session.run(y, {x: 1.0}) == pytest.approx(np.exp(3.0) + 1)
            assert session.run(y, {x: 1.0}) == pytest.approx(np.exp(4.0) + 1)
        assert visible_facts(graph) == before
        with context.eager_mode():
            assert float(tool.scale) == 4.0


def test_an_exception_in_a_routine_is_raised_as_itself(graph) -> None:
    loss, train, init = train_graph()
    before = visible_facts(graph)
    feeds = {"x:0": np.ones([4, 3])}

    class Mine(Exception):
        pass

    class Failing(amanda.Tool):
        def __init__(self, place, at, error):
            self.place, self.at, self.error, self.executions = place, at, error, 0
            backward = "backward" in place
            self.add_inst_for_op(self.analyse, backward=backward, require_outputs="after" in place)

        def analyse(self, context):
            self.executions += not context.is_backward() or bool(context.get_grad_outputs())
            if self.executions == self.at:
                getattr(context, self.place)(self.fail)

        def fail(self, *values):
            raise self.error

    with tf1.Session(graph=graph) as session:
        session.run(init)
        vanilla = session.run(loss, feeds)
        for place in ("insert_before_op", "insert_after_op", "insert_before_backward_op"):
            for at in (1, 4, 7, 11):
                for error in (Mine("own"), tf.errors.InvalidArgumentError(None, None, "own")):
                    tool = Failing(place, at, error)
                    with amanda.apply(tool), pytest.raises(type(error), match="own") as caught:
                        session.run([loss, train], feeds)
                    assert caught.value is error
                    assert any("[amanda] tool Failing" in note for note in error.__notes__)
        with pytest.raises(Mine), amanda.apply(Failing("insert_before_op", 1, Mine())):
            session.make_callable([loss.op, init])()
        assert visible_facts(graph) == before
        assert session.run(init) is None
        assert np.isfinite(vanilla)


def test_an_exception_in_an_analysis_leaves_all_usable(graph, everywhere) -> None:
    loss, train, init = train_graph()
    before = visible_facts(graph)
    feeds = {"x:0": np.ones([4, 3])}
    tool = amanda.Tool()

    def analyse(context):
        if context.get_op_type() == "MatMul":
            raise ValueError("not this one")

    tool.add_inst_for_op(analyse)
    with tf1.Session(graph=graph) as session:
        session.run(init)
        for _ in range(2):
            with amanda.apply(tool, everywhere), pytest.raises(ValueError, match="not this one"):
                session.run(loss, feeds)
        assert visible_facts(graph) == before
        with amanda.apply(everywhere):
            session.run([loss, train], feeds)
        session.run([loss, train], feeds)


def test_errors_of_operations_have_the_users_names(graph, everywhere) -> None:
    x = tf1.placeholder(tf.float32, [None], name="x")
    y = tf.reshape(x, [2, 2], name="square")
    with tf1.Session(graph=graph) as session:
        with pytest.raises(tf.errors.InvalidArgumentError) as vanilla:
            session.run(y, {x: [1.0]})
        with amanda.apply(everywhere), pytest.raises(tf.errors.InvalidArgumentError) as inside:
            session.run(y, {x: [1.0]})
        assert inside.value.op is vanilla.value.op is y.op
        assert "amanda_hidden" not in inside.value.message


def test_a_copy_that_tensorflow_refuses_is_said_and_leaves_session_and_graph_as_they_were(
    graph, everywhere, monkeypatch
) -> None:
    whole = _copies.partition

    def nowhere(*args):
        parted = whole(*args)
        for node in parted.copied:
            node.device = "/job:nowhere/task:7/device:CPU:0"
        return parted

    loss, train, init = train_graph()
    before = visible_facts(graph)
    feeds = {"x:0": np.ones([4, 3])}
    with tf1.Session(graph=graph) as session:
        session.run(init)
        with monkeypatch.context() as patch, amanda.apply(everywhere) as scope:
            patch.setattr(_copies, "partition", nowhere)
            session.run([loss, train], feeds)
        assert [entry.what for entry in scope.report if "refuses" in entry.reason] == ["a run of a session"]
        assert visible_facts(graph) == before
        later = tf.reduce_sum(loss)
        session.run([later, train], feeds)
        with amanda.apply(everywhere):
            session.run([later, train], feeds)

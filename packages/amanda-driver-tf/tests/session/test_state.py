"""State is shared between the user's graph and its copies, never copied."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


@pytest.mark.parametrize("resource", [True, False])
def test_variables_are_trained_through_a_scope(graph, everywhere, resource) -> None:
    x = tf1.placeholder(tf.float32, [None, 3])
    w = tf1.get_variable("w", [3, 2], initializer=tf1.ones_initializer(), use_resource=resource)
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w)), name="loss")
    train = tf1.train.AdamOptimizer(0.1).minimize(loss)
    feeds = {x: [[1.0, 2.0, 3.0]]}

    def steps(inside):
        with tf1.Session(graph=graph) as session:
            session.run(tf1.global_variables_initializer())
            losses = []
            for step in range(6):
                if step in inside:
                    with amanda.apply(everywhere):
                        losses.append(session.run([loss, train], feeds)[0])
                else:
                    losses.append(session.run([loss, train], feeds)[0])
            return losses, session.run(tf1.global_variables())

    vanilla, mixed = steps(()), steps((1, 2, 4))
    np.testing.assert_equal(mixed[0], vanilla[0])
    np.testing.assert_equal(mixed[1], vanilla[1])


def test_variables_are_initialized_and_assigned_in_a_scope(graph, everywhere) -> None:
    v = tf1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
    r = tf1.get_variable("r", initializer=[1.0, 2.0], use_resource=False)
    changes = [tf1.assign_add(v, [1.0, 1.0]), tf1.assign_sub(r, [1.0, 1.0]), tf1.scatter_add(r, [0], [10.0])]
    with tf1.Session(graph=graph) as session:
        with amanda.apply(everywhere):
            session.run(tf1.global_variables_initializer())
            for change in changes:
                session.run(change)
        np.testing.assert_equal(session.run([v, r]), [[2, 3], [10, 1]])


def test_iterators_go_on(graph, everywhere) -> None:
    data = tf1.data.Dataset.range(10)
    one_shot = tf1.data.make_one_shot_iterator(data).get_next()
    iterator = tf1.data.make_initializable_iterator(data.map(lambda i: i * 2))
    n = tf.identity(iterator.get_next(), name="n")
    with tf1.Session(graph=graph) as session:
        session.run(iterator.initializer)
        values = [session.run([n, one_shot])]
        with amanda.apply(everywhere):
            values.append(session.run([n, one_shot]))
            values.append(session.run([n, one_shot]))
        values.append(session.run([n, one_shot]))
        assert values == [[0, 0], [2, 1], [4, 2], [6, 3]]
        with amanda.apply(everywhere):
            session.run(iterator.initializer)
            assert session.run(n) == 0
            for _ in range(6):
                session.run(one_shot)
            with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
                session.run(one_shot)
    assert everywhere.ran["n"] == 3


def test_queues_and_tables(graph, everywhere) -> None:
    queue = tf1.FIFOQueue(10, tf.int32, [])
    item = tf1.placeholder(tf.int32, [])
    enqueue, get = queue.enqueue(item), queue.dequeue()
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    insert, find = table.insert(["a"], [7]), table.lookup(tf.constant(["a", "b"]))
    static = tf1.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["k"], [3]), -1)
    static_values = static.lookup(tf.constant(["k", "?"]))
    with tf1.Session(graph=graph) as session:
        session.run(tf1.tables_initializer())
        session.run(enqueue, {item: 1})
        with amanda.apply(everywhere):
            session.run(enqueue, {item: 2})
            assert session.run(get) == 1
            session.run(insert)
            np.testing.assert_equal(session.run(find), [7, -1])
            np.testing.assert_equal(session.run(static_values), [3, -1])
        assert session.run(get) == 2
        np.testing.assert_equal(session.run(find), [7, -1])


def draws(graph, tensors, inside, tool):
    with tf1.Session(graph=graph) as session:
        values = []
        for step in range(4):
            if step in inside:
                with amanda.apply(tool) as scope:
                    values.append(session.run(tensors))
                assert not [entry for entry in scope.report if "begins anew" in entry.reason]
            else:
                values.append(session.run(tensors))
        return values


class After(amanda.Tool):
    """Gives back the outputs of every op."""

    def __init__(self):
        self.count = 0
        self.add_inst_for_op(lambda context: context.insert_after_op(self.same), require_outputs=True)

    def same(self, *values):
        self.count += 1
        return values


class OfMatMul(amanda.Tool):
    """Gives back the inputs and outputs of MatMul."""

    def __init__(self):
        self.count = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        if context.get_op_type() == "MatMul":
            context.insert_before_op(self.same)
            context.insert_after_op(self.same)

    def same(self, *values):
        self.count += 1
        return values


def test_generators_in_kernels_stay_where_they_are(graph) -> None:
    tf1.set_random_seed(3)
    x = tf1.get_variable("x", [4, 4], initializer=tf1.zeros_initializer())
    noise = tf1.random_normal([4, 4], seed=5)
    y = tf.matmul(noise + x, noise) + tf1.random_uniform([4, 4], seed=7)
    tensors = [tf.nn.dropout(y, 0.5, seed=9), noise]
    with tf1.Session(graph=graph):
        pass
    init = tf1.zeros_initializer
    del init

    def run(inside, tool):
        with tf1.Session(graph=graph) as session:
            session.run(x.initializer)
            values = []
            for step in range(4):
                if step in inside:
                    with amanda.apply(tool) as scope:
                        values.append(session.run(tensors))
                    assert not [entry for entry in scope.report if "begins anew" in entry.reason]
                else:
                    values.append(session.run(tensors))
            return values

    tool = OfMatMul()
    np.testing.assert_equal(run((1, 2), tool), run((), tool))
    assert tool.count == 4


def test_a_generator_that_reads_what_is_instrumented_draws_from_the_same_state(graph, everywhere) -> None:
    x = tf1.placeholder(tf.float32, [None])
    noise = tf1.random_normal(tf.shape(x * 2.0), seed=5, name="noise")
    tensors = [noise, tf.nn.dropout(x, 0.5, seed=6)]

    def run(inside):
        with tf1.Session(graph=graph) as session:
            values = []
            for step in range(5):
                feeds = {x: np.ones([step + 1])}
                if step in inside:
                    with amanda.apply(everywhere) as scope:
                        values.append(session.run(tensors, feeds))
                    assert not scope.report
                else:
                    values.append(session.run(tensors, feeds))
            return values

    np.testing.assert_equal(run((1, 2, 4)), run(()))
    assert everywhere.ran


def test_a_generator_in_a_branch_is_reported(graph, everywhere) -> None:
    x = tf1.placeholder(tf.float32, [2])
    y = tf1.cond(x[0] > 0, lambda: tf1.random_normal(tf.shape(x), seed=5), lambda: x)
    with tf1.Session(graph=graph) as session, amanda.apply(everywhere) as scope:
        session.run(y, {x: [1, 2]})
    assert any("RandomStandardNormal" in entry.what for entry in scope.report)


def test_generators_in_variables_are_shared(graph, everywhere) -> None:
    generator = tf.random.Generator.from_seed(3)
    y = generator.normal([2])
    z = tf.random.stateless_normal([2], [1, 2])

    def run(inside):
        with tf1.Session(graph=graph) as session:
            session.run(tf1.global_variables_initializer())
            values = []
            for step in range(4):
                if step in inside:
                    with amanda.apply(everywhere):
                        values.append(session.run([y, z]))
                else:
                    values.append(session.run([y, z]))
            return values

    np.testing.assert_equal(run((1, 2)), run(()))


def test_checkpoints_are_the_same_bytes(graph, everywhere, tmp_path) -> None:
    w = tf1.get_variable("w", [3, 2], initializer=tf1.ones_initializer(), use_resource=True)
    r = tf1.get_variable("r", initializer=[1.0, 2.0], use_resource=False)
    train = tf1.train.AdamOptimizer().minimize(tf.reduce_sum(w) + tf.reduce_sum(r * r))
    saver = tf1.train.Saver()
    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        session.run(train)
        saver.save(session, str(tmp_path / "outside" / "model"))
        with amanda.apply(everywhere):
            session.run(w)
            saver.save(session, str(tmp_path / "inside" / "model"))
            session.run(train)
            saver.restore(session, str(tmp_path / "outside" / "model"))
            session.run(train)
        tf1.train.Saver().save(session, str(tmp_path / "after" / "model"))
        saver.restore(session, str(tmp_path / "outside" / "model"))
        session.run(train)
        saver.save(session, str(tmp_path / "vanilla" / "model"))
    for folder, expected_folder in (("inside", "outside"), ("after", "vanilla")):
        for name in ("model.data-00000-of-00001", "model.index"):
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / expected_folder / name).read_bytes()
    assert (tmp_path / "inside" / "model.meta").read_bytes() == (
        tmp_path / "outside" / "model.meta"
    ).read_bytes()

"""Every way to run a session: what is fetched and fed, and who runs it."""

from __future__ import annotations

import threading
from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda
from amanda.action import opening

tf1 = tf.compat.v1
Pair = namedtuple("Pair", "first second")


@pytest.fixture
def x(graph):
    return tf1.placeholder(tf.float32, [2], name="x")


@pytest.fixture
def session(graph):
    with tf1.Session(graph=graph) as session:
        yield session


def test_structures_of_fetches_keep_their_form(graph, x, session, everywhere) -> None:
    y, z = tf.exp(x, name="y"), tf.sin(x, name="z")
    fetches = {"pair": Pair(y, [z, z.op]), "tuple": (y, {"inner": x}), "name": "y:0", "op": "z"}
    vanilla = session.run(fetches, {x: [1, 2]})
    with amanda.apply(everywhere):
        inside = session.run(fetches, {x: [1, 2]})
    np.testing.assert_equal(inside, vanilla)
    assert isinstance(inside["pair"], Pair)
    assert everywhere.ran["y"] == everywhere.ran["z"] == 1


def test_sparse_tensors_are_fetched_and_fed(graph, session, everywhere) -> None:
    sparse = tf1.sparse_placeholder(tf.float32, [2, 3])
    doubled = tf.sparse.map_values(tf.multiply, sparse, 2.0)
    dense = tf.sparse.to_dense(doubled)
    value = tf1.SparseTensorValue([[0, 1], [1, 2]], [1.0, 5.0], [2, 3])
    vanilla = session.run([doubled, dense, sparse], {sparse: value})
    with amanda.apply(everywhere):
        inside = session.run([doubled, dense, sparse], {sparse: value})
    np.testing.assert_equal(inside, vanilla)
    assert everywhere.ran


def test_indexed_slices_are_fetched(graph, session, everywhere) -> None:
    table = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    (slices,) = tf.gradients(tf.gather(table, [1, 1]) * 2.0, table)
    vanilla = session.run(slices)
    with amanda.apply(everywhere):
        inside = session.run(slices)
    np.testing.assert_equal(inside, vanilla)


def test_an_intermediate_tensor_is_fed(graph, x, session, everywhere) -> None:
    middle = tf.exp(x, name="middle")
    first, second = tf.split(middle * 2.0, 2, name="split")
    total = tf.add(first, second, name="total")
    feeds = {middle: [1.0, 2.0], first: [7.0]}
    vanilla = session.run([total, middle, first, second], feeds)
    with amanda.apply(everywhere):
        inside = session.run([total, middle, first, second], feeds)
    np.testing.assert_equal(inside, vanilla)
    assert everywhere.ran["total"] == 1
    assert "middle" not in everywhere.ran


def test_other_fetches_and_feeds_are_other_copies(graph, x, session, everywhere) -> None:
    y, z = tf.exp(x, name="y"), tf.sin(x, name="z")
    with amanda.apply(everywhere):
        session.run(y, {x: [1, 2]})
        assert set(everywhere.counts) == {"y"}
        session.run(z, {x: [1, 2]})
        session.run([y, z], {x: [1, 2]})
    assert everywhere.counts == {"y": 1, "z": 1}
    assert everywhere.ran["y"] == everywhere.ran["z"] == 2


@pytest.mark.parametrize("kind", ["tensor", "operation", "list", "fed", "options"])
def test_callables_made_before_the_scope(graph, x, session, everywhere, kind) -> None:
    y = tf.exp(tf.constant([1.0, 2.0]), name="y")
    fed = tf.sin(x, name="fed")
    session_callable = {
        "tensor": lambda: session.make_callable(y),
        "operation": lambda: session.make_callable(y.op),
        "list": lambda: session.make_callable([y, {"again": y}]),
        "fed": lambda: session.make_callable(fed, [x]),
        "options": lambda: session.make_callable([y], accept_options=True),
    }[kind]()
    args = ([1.0, 2.0],) if kind == "fed" else ()
    vanilla = session_callable(*args)
    with amanda.apply(everywhere):
        np.testing.assert_equal(session_callable(*args), vanilla)
    assert everywhere.ran["fed" if kind == "fed" else "y"] == 1
    np.testing.assert_equal(session_callable(*args), vanilla)
    assert everywhere.ran["fed" if kind == "fed" else "y"] == 1


def test_partial_runs(graph, session, everywhere) -> None:
    a, b, c = (tf1.placeholder(tf.float32, []) for _ in range(3))
    first = tf.add(a, b, name="first")
    second = tf.multiply(first, c, name="second")
    with amanda.apply(everywhere):
        handle = session.partial_run_setup([first, second], [a, b, c])
        assert session.partial_run(handle, first, {a: 1, b: 2}) == 3
        assert everywhere.ran["first"] == 1
        assert session.partial_run(handle, second, {c: 5}) == 15
    assert everywhere.ran["second"] == 1
    handle = session.partial_run_setup([first, second], [a, b, c])
    assert session.partial_run(handle, first, {a: 1, b: 2}) == 3
    assert everywhere.ran["first"] == 1


def test_routines_run_between_the_parts_of_a_partial_run(graph) -> None:
    a, b = (tf1.placeholder(tf.float32, []) for _ in range(2))
    first = tf.negative(a)
    second = tf.multiply(tf.exp(a), b)
    fetched, ran = threading.Event(), threading.Event()

    def late(value) -> None:
        fetched.wait(60)
        ran.set()

    # The routine holds one thread for ops; the first part needs another, which no other session may hold.
    threads = tf1.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    with (
        tf1.Session(graph=graph, config=threads) as session,
        amanda.apply(inserting("insert_after_op", "Exp", late)),
    ):
        handle = session.partial_run_setup([first, second], [a, b])
        assert session.partial_run(handle, first, {a: 0}) == 0
        fetched.set()
        assert ran.wait(10)
        assert session.partial_run(handle, second, {b: 5}) == 5


def test_a_partial_run_begins_once(graph, session) -> None:
    a, b = (tf1.placeholder(tf.float32, []) for _ in range(2))
    first = tf.exp(a)
    second = tf.multiply(first, b)
    begun = []
    with amanda.apply(inserting("insert_before_op", "Exp", opening(lambda: begun.append(1)))):
        for times in (1, 2):
            handle = session.partial_run_setup([first, second], [a, b])
            session.partial_run(handle, first, {a: 0})
            session.partial_run(handle, second, {b: 5})
            assert len(begun) == times


def test_an_exception_between_the_parts_of_a_partial_run_is_raised_by_the_next(graph) -> None:
    a, b = (tf1.placeholder(tf.float32, []) for _ in range(2))
    first, second = tf.negative(a), tf.multiply(tf.exp(a), b)
    fetched = threading.Event()

    def late(value) -> None:
        fetched.wait(60)
        raise ZeroDivisionError("a tool's own mistake")

    # The routine holds one thread for ops; the first part needs another, which no other session may hold.
    threads = tf1.ConfigProto(inter_op_parallelism_threads=4, use_per_session_threads=True)
    with (
        tf1.Session(graph=graph, config=threads) as session,
        amanda.apply(inserting("insert_after_op", "Exp", late)),
    ):
        handle = session.partial_run_setup([first, second], [a, b])
        session.partial_run(handle, first, {a: 0})
        fetched.set()
        with pytest.raises(ZeroDivisionError, match="a tool's own mistake"):
            session.partial_run(handle, second, {b: 5})


def test_eval_and_run_of_tensors_and_operations(graph, x, everywhere) -> None:
    v = tf1.get_variable("v", initializer=[1.0, 2.0])
    y = tf.add(v, x, name="y")
    with tf1.Session(graph=graph), amanda.apply(everywhere):
        tf1.global_variables_initializer().run()
        np.testing.assert_equal(y.eval({x: [1, 2]}), [2, 4])
        np.testing.assert_equal(v.eval(), [1, 2])
    assert everywhere.ran["y"] == 1


def test_a_monitored_session_and_its_finalized_graph(graph, everywhere, tmp_path) -> None:
    tf1.train.get_or_create_global_step()
    w = tf1.get_variable("w", initializer=[1.0, 2.0])
    loss = tf.reduce_sum(w * w, name="loss")
    train = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
    losses = []
    with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session:
        for step in range(4):
            if step == 2:
                with amanda.apply(everywhere):
                    losses.append(session.run([train, loss])[1])
            else:
                losses.append(session.run([train, loss])[1])
        assert graph.finalized
    np.testing.assert_allclose(losses[1:], np.array(losses[:-1]) * 0.64, rtol=1e-6)
    assert everywhere.ran["loss"] == 1


def test_several_sessions_and_graphs(everywhere) -> None:
    programs = []
    for factor in (2.0, 3.0):
        graph = tf.Graph()
        with graph.as_default():
            v = tf1.get_variable("v", initializer=factor)
            programs.append((graph, tf.multiply(v, 10.0, name="y"), v.assign(factor + 1), v.initializer))
    with amanda.apply(everywhere):
        for graph, y, change, start in programs:
            with tf1.Session(graph=graph) as first, tf1.Session(graph=graph) as second:
                first.run(start), second.run(start)
                before = first.run(y)
                first.run(change)
                assert (first.run(y), second.run(y)) == (before + 10, before)
    assert everywhere.ran["y"] == 6


def test_a_graph_that_grows_between_runs(graph, x, session, everywhere) -> None:
    y = tf.exp(x, name="y")
    with amanda.apply(everywhere):
        session.run(y, {x: [1, 2]})
        z = tf.sin(y, name="z")
        (grad,) = tf.gradients(z, x)
        inside = session.run([z, grad], {x: [1, 2]})
    np.testing.assert_equal(inside, session.run([z, grad], {x: [1, 2]}))


def test_run_metadata_and_options(graph, x, session, everywhere) -> None:
    y = tf.exp(x, name="y")
    metadata = tf1.RunMetadata()
    with amanda.apply(everywhere):
        session.run(y, {x: [1, 2]}, tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), metadata)
    assert metadata.step_stats.dev_stats


def test_sessions_of_servers_are_reported(graph, everywhere) -> None:
    server = tf.distribute.Server.create_local_server()
    y = tf.exp(tf.constant(1.0))
    with tf1.Session(server.target) as session, amanda.apply(everywhere) as scope:
        assert session.run(y) == pytest.approx(np.exp(1.0))
    assert [entry.what for entry in scope.report] == ["a session of a server"]


def test_callables_of_options(graph, x, session, everywhere) -> None:
    from tensorflow.core.protobuf import config_pb2

    tf.exp(x, name="y")
    options = config_pb2.CallableOptions(feed=["x:0"], fetch=["y:0"], target=["y"])
    early = session._make_callable_from_options(options)
    vanilla = early(np.float32([1, 2]))
    with amanda.apply(everywhere) as scope:
        late = session._make_callable_from_options(options)
        np.testing.assert_equal(late(np.float32([1, 2])), vanilla)
        assert everywhere.ran["y"] == 1
        early(np.float32([1, 2]))
    assert "a session's callable" in [entry.what for entry in scope.report]
    np.testing.assert_equal(late(np.float32([1, 2])), vanilla)
    assert everywhere.ran["y"] == 1

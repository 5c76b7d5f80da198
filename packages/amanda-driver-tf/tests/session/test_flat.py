"""Copies are kept once, and released with what they are for."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import children
import pytest
import tensorflow as tf
from tensorflow.python.framework import c_api_util
from tensorflow.python.framework.ops import pywrap_tf_session as c_api

import amanda

tf1 = tf.compat.v1


class Doubling(amanda.Tool):
    def __init__(self):
        self.analysed = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        self.analysed += 1
        if context.get_op_type() == "Exp":
            context.insert_before_op(self.doubled)

    def doubled(self, value):
        return value * 2.0


def size_in_c(graph):
    with c_api_util.tf_buffer() as buffer:
        with graph._c_graph.get() as c_graph:
            c_api.TF_GraphToGraphDef(c_graph, buffer)
        return len(c_api.TF_GetBuffer(buffer))


@pytest.fixture
def y(graph):
    x = tf1.get_variable("x", initializer=1.0)
    return tf.sin(tf.exp(x)) * 2.0


def test_an_op_is_analysed_once(graph, y) -> None:
    tool = Doubling()
    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        with amanda.apply(tool):
            first = session.run(y)
        count = tool.analysed
        with amanda.apply(tool):
            assert session.run(y) == first
            assert session.run([y, y + 1.0])[0] == first
        assert tool.analysed == count + 2
        with amanda.apply(tool), amanda.cache_disabled():
            assert session.run(y) == first
            assert session.run(y) == first
        assert tool.analysed == 3 * count + 2


@pytest.mark.slow
@pytest.mark.parametrize("equal", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hundreds_of_scopes_are_flat(graph, y, equal) -> None:
    tool = Doubling()

    def scope():
        with amanda.apply(Doubling() if equal else tool):
            session.run(y)

    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(20):
            scope()
        gc.collect()
        size = size_in_c(graph)
        tracemalloc.start()
        try:
            for _ in range(130):
                scope()
            gc.collect()
            first, _ = tracemalloc.get_traced_memory()
            for _ in range(150):
                scope()
            gc.collect()
            second, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert size_in_c(graph) == size
        assert second - first < 30_000


def test_copies_die_with_their_graph_and_their_tool() -> None:
    tool = Doubling()
    graph = tf.Graph()
    with graph.as_default(), tf1.Session() as session:
        y = tf.exp(tf.constant(1.0))
        with amanda.apply(tool):
            session.run(y)
        with amanda.apply(second_tool := Doubling()):
            session.run(y)
        gone = weakref.ref(second_tool)
        del second_tool
        gc.collect()
        assert gone() is None
    gone = weakref.ref(graph)
    del graph, session, y
    gc.collect()
    assert gone() is None
    assert not tool._amanda.stacks[next(iter(tool._amanda.stacks))].plans


@pytest.mark.long
def test_ids_are_the_same_in_equal_programs() -> None:
    import sys

    program = """
import tensorflow as tf, amanda
tf1 = tf.compat.v1
tool = amanda.Tool()
tool.add_inst_for_op(lambda context: print(context.get_op_id(), context.get_op().name))
with tf.Graph().as_default(), tf1.Session() as session, amanda.apply(tool):
    session.run(tf.exp(tf.constant(1.0)))
"""
    outputs = {children.run([sys.executable, "-c", program], check=True).stdout for _ in range(2)}
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 2

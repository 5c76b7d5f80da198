"""TensorFlow's ResNet-50: the counts of the paper, and the edges of TensorFlow's own graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import amanda
from amanda.tools.trace import Graph, Op, TraceTool

KERAS = {"conv2d": 53, "relu": 49, "max_pool2d": 1, "matmul": 1}
SHAPE = (64, 64, 3)


def assert_is_resnet(graph: Graph, operations: Sequence[Any]) -> None:
    """The counts of the paper, and for each op the inputs that TensorFlow's operation of that name has."""
    found = Counter(op.type for op in graph.ops)
    assert {kind: found[kind] for kind in KERAS} == KERAS
    residual = [op for op in graph.ops if op.type == "add" and re.search(r"block\d_add", op.name)]
    assert len(residual) == 16
    theirs = {op.name: op for op in operations}
    ours = [op for op in graph.ops if not graph.frameworks[op.framework].endswith("/eager")]
    for op in ours:
        makers = [None if one is None else graph.ops[one].name for one in _makers(graph, op)]
        expected = [tensor.op.name for tensor in theirs[op.name].inputs]
        outside = {name for name in expected if theirs[name].type == "Placeholder"}
        assert makers == [None if name in outside else name for name in expected]
    assert len({op.name for op in ours}) == len(ours) > 500


def _makers(graph: Graph, op: Op) -> list[int | None]:
    return [graph.tensors[index].producer for index in op.reads]


@pytest.mark.slow
def test_a_function_has_the_ops_and_edges_of_its_graph() -> None:
    network = keras.applications.ResNet50(weights=None, input_shape=SHAPE)
    images = tf.ones((1, *SHAPE))
    function = tf.function(lambda x: network(x, training=False))
    operations = function.get_concrete_function(images).graph.get_operations()
    tracer = TraceTool()
    with amanda.apply(tracer):
        function(images)
    assert_is_resnet(tracer.graph, operations)
    assert len(tracer.graph.ops) == sum(op.type != "Placeholder" for op in operations)


@pytest.mark.slow
def test_a_session_has_the_ops_and_edges_of_its_graph() -> None:
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.Session(graph=graph) as session:
        given = tf.compat.v1.placeholder(tf.float32, (None, *SHAPE))
        output = tf_keras.applications.ResNet50(weights=None, input_shape=SHAPE)(given, training=False)
        session.run(tf.compat.v1.global_variables_initializer())
        tracer = TraceTool()
        with amanda.apply(tracer):
            session.run(output, {given: np.ones((1, *SHAPE))})
    assert_is_resnet(tracer.graph, graph.get_operations())
    assert sum(op.type == "batch_norm" for op in tracer.graph.ops) == 53

"""The traced graph with TensorFlow: eager mode, functions and sessions."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import networkx
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.trace import Graph, Op, TraceTool

v1 = tf.compat.v1
_AROUND = {"ReadVariableOp", "Const", "NoOp", "Identity", "Placeholder"}
"""Ops that a mode has and another has not."""


def trace(program: Callable[[], Any], **options: Any) -> Graph:
    tool = TraceTool(**options)
    with amanda.apply(tool):
        program()
    return tool.graph


def named(graph: Graph, *types: str) -> list[Op]:
    return [op for op in graph.ops if op.type in types]


def one(graph: Graph, kind: str) -> Op:
    (found,) = named(graph, kind)
    return found


def feeds(graph: Graph, first: Op, then: Op) -> bool:
    return networkx.has_path(graph.to_networkx(), first.index, then.index)


def computed(graph: Graph) -> list[tuple[Any, ...]]:
    """Of each op that computes: its type, its outputs, its forward op's type and those of its producers.

    Of backward ops: those on the way of a gradient.
    """
    return [
        (
            op.phase, op.type, [str(tensor) for tensor in graph.outputs(op)],
            None if op.forward is None else graph.ops[op.forward].type,
            sorted(producer.type for producer in graph.producers(op) if producer.type not in _AROUND),
        )
        for op in graph.ops
        if op.type not in _AROUND and op.makes and (op.phase == "forward" or op.reads)
    ]  # fmt: skip


@pytest.fixture
def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, activation="relu", name="dense"),
            keras.layers.Dense(2, name="dense_1"),
        ]
    )


@pytest.fixture
def x() -> Any:
    return tf.constant(np.arange(20, dtype=np.float32).reshape(5, 4))


def step(model: keras.Model, x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x)))
    return [loss, *tape.gradient(loss, model.trainable_variables)]


@contextmanager
def session(build: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    """A session over a graph, with its variables set, and what was built."""
    graph = tf.Graph()
    with graph.as_default():
        built = build()
        with v1.Session(graph=graph) as opened:
            opened.run(v1.global_variables_initializer())
            yield opened, built


def test_layers_variables_and_edges_are_told_eagerly(model: keras.Model, x: Any) -> None:
    graph = trace(lambda: model(x))
    product, bias, relu = named(graph, "matmul")[0], named(graph, "BiasAdd")[0], one(graph, "relu")
    assert (product.module, product.calls) == ("dense", 1)
    assert product.source.startswith(f"{__file__}:")
    assert graph.consumers(product) == (bias,)
    assert graph.producers(relu) == (bias,)
    kernel = graph.tensors[product.reads[1]]
    assert (kernel.kind, kernel.shape) == ("parameter", (4, 3))
    assert kernel.name is not None
    assert kernel.name.endswith("dense/kernel")
    assert graph.tensors[product.reads[0]].kind == "input"


def test_the_graph_of_a_step_is_the_same_eagerly_and_in_a_function(model: keras.Model, x: Any) -> None:
    eager = trace(lambda: step(model, x))
    function = tf.function(step)
    graph = trace(lambda: function(model, x))
    assert computed(eager) == computed(graph)
    assert len(named(graph, "matmul_backward")) == 3
    named_variables = {tensor.name for tensor in eager.tensors if tensor.kind == "parameter"}
    assert {tensor.name for tensor in graph.tensors if tensor.kind == "parameter"} == named_variables


def test_training_eagerly_is_the_same_to_the_bit(model: keras.Model, x: Any) -> None:
    bare = step(model, x)
    with amanda.apply(TraceTool()):
        traced = step(model, x)
    assert all(np.array_equal(a, b) for a, b in zip(bare, traced, strict=True))


def test_a_second_step_is_counted_eagerly(model: keras.Model, x: Any) -> None:
    tool = TraceTool()
    with amanda.apply(tool):
        step(model, x)
        first = tool.graph
        step(model, x)
    assert {op.calls for op in tool.graph.ops} == {2}
    assert len(tool.graph.tensors) == len(first.tensors)


@pytest.mark.parametrize("eagerly", [False, True])
def test_fitting_has_the_graph_of_one_step(model: keras.Model, eagerly: bool) -> None:
    model.compile("sgd", "mse", run_eagerly=eagerly)
    x, y = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)
    tool = TraceTool()
    with amanda.apply(tool):
        model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    forward = [op for op in tool.graph.ops if op.phase == "forward"]
    assert [op.type for op in forward if op.type in ("matmul", "relu")] == ["matmul", "relu", "matmul"]
    assert {op.calls for op in forward if op.type == "matmul"} == {6 if eagerly else None}


def test_eager_tensors_are_not_kept(x: Any) -> None:
    with amanda.apply(TraceTool()):
        y = tf.exp(x)
        held = weakref.ref(y)
        tf.sin(y)
        del y
        gc.collect()
        assert held() is None


def test_what_is_assigned_reaches_those_that_read_the_variable() -> None:
    variable = tf.Variable([1.0, 2.0], name="counter")

    def program() -> Any:
        variable.assign_add([1.0, 1.0])
        return tf.exp(variable)

    for run in (program, tf.function(program)):
        graph = trace(run)
        assert one(graph, "add").in_place
        assert feeds(graph, one(graph, "add"), one(graph, "exp"))


def test_a_function_runs_as_it_would_have(model: keras.Model, x: Any) -> None:
    function = tf.function(step)
    without = function(model, x)
    tool = TraceTool()
    with amanda.apply(tool):
        within = function(model, x)
    assert all(np.array_equal(a, b) for a, b in zip(without, within, strict=True))
    assert {op.calls for op in tool.graph.ops} == {None}


def test_executions_in_graphs_are_counted_on_request(x: Any) -> None:
    @tf.function
    def loop(y: Any) -> Any:
        for _ in tf.range(3):
            y = tf.sin(y)
        return tf.exp(y)

    tool = TraceTool(count=True)
    with amanda.apply(tool):
        loop(x)
        loop(x)
    assert (one(tool.graph, "sin").calls, one(tool.graph, "exp").calls) == (6, 2)


def test_a_loop_reads_what_it_is_entered_with(x: Any) -> None:
    @tf.function
    def loop(y: Any) -> Any:
        y = tf.exp(y)
        i = tf.constant(0)
        while i < 3:
            y = tf.sin(y)
            i += 1
        return tf.cos(y)

    graph = trace(lambda: loop(x))
    (entered,) = [op for op in graph.ops if op.type in ("While", "StatelessWhile")]
    assert graph.producers(one(graph, "sin")) == (one(graph, "exp"),)
    assert one(graph, "exp") in graph.producers(entered)
    assert graph.producers(one(graph, "cos")) == (entered,)


def test_branches_read_what_is_around_them(x: Any) -> None:
    @tf.function
    def branch(y: Any) -> Any:
        y = tf.exp(y)
        return tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.sin(y), lambda: tf.cos(y))

    graph = trace(lambda: branch(x))
    for kind in ("sin", "cos"):
        assert graph.producers(one(graph, kind)) == (one(graph, "exp"),)


def test_a_function_that_is_called_reads_its_arguments(x: Any) -> None:
    @tf.function
    def inner(a: Any, b: Any) -> Any:
        return tf.sin(a) + tf.cos(b)

    @tf.function
    def outer(y: Any) -> Any:
        return inner(tf.exp(y), tf.square(y))

    graph = trace(lambda: outer(x))
    assert graph.producers(one(graph, "sin")) == (one(graph, "exp"),)
    assert graph.producers(one(graph, "cos")) == (one(graph, "square"),)


def test_variables_are_known_within_functions_that_are_called(x: Any) -> None:
    variable = tf.Variable(tf.ones(4), name="scale")

    @tf.function
    def inner(a: Any) -> Any:
        return a * variable

    @tf.function
    def outer(y: Any) -> Any:
        return tf.cond(tf.reduce_sum(y) > 0.0, lambda: inner(tf.exp(y)), lambda: y)

    tool = TraceTool()
    with amanda.apply(tool):
        outer(x)
    graph = tool.graph
    assert "exp" in [op.type for op in graph.producers(one(graph, "mul"))]
    assert [tensor.kind for tensor in graph.inputs(one(graph, "mul"))] == ["activation", "parameter"]
    assert [tensor.name for tensor in graph.tensors if tensor.kind == "parameter"] == ["scale"] * 2
    held = weakref.ref(outer.get_concrete_function(x).graph)
    del outer
    gc.collect()
    assert held() is None


def build() -> tuple[Any, ...]:
    placeholder = v1.placeholder(tf.float32, (None, 4), name="given")
    weight = v1.get_variable("weight", (4, 3), use_resource=True)
    y = tf.nn.relu(placeholder @ weight)
    left, right = tf.split(tf.concat([y, y], 1), 2, 1)
    return placeholder, left + right, v1.gradients(left * right, [weight])


def test_a_session_has_the_ops_that_it_runs(x: Any) -> None:
    with session(build) as (opened, (placeholder, total, gradients)):
        tool = TraceTool()
        with amanda.apply(tool):
            opened.run([total, gradients], {placeholder: x.numpy()})
    graph = tool.graph
    cat, split, add = one(graph, "cat"), one(graph, "split"), one(graph, "add")
    assert isinstance(cat.inputs[0], tuple)
    assert cat.inputs[0][0] == cat.inputs[0][1]
    assert graph.producers(add) == (split,)
    given = next(tensor for tensor in graph.tensors if tensor.name == "given:0")
    assert (given.kind, given.shape, str(given)) == ("input", (None, 4), "float32[?,4]")
    backward = one(graph, "relu_backward")
    assert backward.forward == one(graph, "relu").index
    assert [op.type for op in graph.producers(backward)] == ["accumulate_grad"]
    assert json.loads(json.dumps(graph.to_dict())) is not None


def test_a_loop_of_the_first_version_reads_what_it_makes_itself() -> None:
    def looped() -> Any:
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, tf.exp, [tf.constant([0.0, 1.0])])

    v1.disable_control_flow_v2()
    try:
        with session(looped) as (opened, result):
            tool = TraceTool()
            with amanda.apply(tool):
                opened.run(result)
    finally:
        v1.enable_control_flow_v2()
    graph = tool.graph
    merge, exp, again = one(graph, "Merge"), one(graph, "exp"), one(graph, "NextIteration")
    assert again in graph.producers(merge)
    assert feeds(graph, merge, exp)
    assert feeds(graph, exp, merge)


class Looker(amanda.Tool):
    """Notes which ops lead to a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.depends_on(TraceTool())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context["type"] == "sin":
            self.found = [op.type for op in context["graph"].producers(context)]


def test_a_dependent_tool_finds_producers_in_every_mode(x: Any) -> None:
    def program(y: Any) -> Any:
        return tf.sin(tf.exp(y))

    looker = Looker()
    with amanda.apply(looker):
        program(x)
    assert looker.found == ["exp"]
    looker = Looker()
    with amanda.apply(looker):
        tf.function(program)(x)
    assert looker.found == ["exp"]

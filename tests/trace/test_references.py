"""The graph of ResNet-50, op by op, beside torch.fx's, TorchLens's, autograd's own, and TensorFlow's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import torch
import torchlens
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import amanda
from amanda.tools.trace import Graph, Op, TraceTool

COMPUTED = {"conv2d": 53, "batch_norm": 53, "relu": 49, "add": 16, "max_pool2d": 1, "linear": 1}


class Node(NamedTuple):
    """One op of a forward pass. producers: which ops made its inputs; None: the model's own input."""

    type: str
    shape: tuple[int | None, ...] | None
    producers: tuple[int | None, ...]


@pytest.fixture(scope="module")
def model(resnet50: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return resnet50().eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(1, 3, 32, 32)


@pytest.fixture(scope="module")
def graph(model: nn.Module, images: Tensor) -> Graph:
    tracer = TraceTool()
    with amanda.apply(tracer):
        model(images).sum().backward()
    return tracer.graph


@pytest.fixture(scope="module")
def nodes(graph: Graph) -> list[Node]:
    """The model's own ops: those of the loss come last."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    assert [op.type for op in forward[-2:]] == ["sum", "ones_like"]
    return [_node(graph, op) for op in forward[:-2]]


def _node(graph: Graph, op: Op) -> Node:
    data = [one.producer for one in graph.inputs(op) if one.kind in ("activation", "input")]
    return Node(op.type, graph.outputs(op)[0].shape, tuple(data))


def test_the_model_has_the_ops_that_its_paper_says(nodes: list[Node]) -> None:
    found = Counter(node.type for node in nodes)
    assert {kind: found[kind] for kind in COMPUTED} == COMPUTED
    assert len(nodes) == sum(COMPUTED.values()) + 2  # the pooling at the end, and a reshape


# ---- torch.fx ----


def test_ops_shapes_and_edges_are_those_of_torch_fx(
    model: nn.Module, images: Tensor, graph: Graph, nodes: list[Node]
) -> None:
    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(images)  # type: ignore[no-untyped-call]
    order = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    position = {node: i for i, node in enumerate(order)}
    expected = [
        Node(
            _word_of_fx(model, node),
            tuple(node.meta["tensor_meta"].shape),
            tuple(position.get(one) for one in node.all_input_nodes),
        )
        for node in order
    ]
    assert nodes == expected
    paths = [(graph.ops[i].module, node.target) for i, node in enumerate(order) if node.op == "call_module"]
    assert len(paths) == len(nodes) - COMPUTED["add"] - 1
    assert all(ours == theirs for ours, theirs in paths)


def _word_of_fx(model: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        kind = type(model.get_submodule(str(node.target))).__name__
        return {
            "Conv2d": "conv2d", "BatchNorm2d": "batch_norm", "ReLU": "relu", "MaxPool2d": "max_pool2d",
            "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "Linear": "linear",
        }[kind]  # fmt: skip
    return {"add": "add", "flatten": "reshape"}[node.target.__name__]  # type: ignore[union-attr]


# ---- TorchLens ----


def test_ops_shapes_and_edges_are_those_of_torchlens(
    model: nn.Module, images: Tensor, nodes: list[Node]
) -> None:
    traced = torchlens.trace(model, images)
    order = [op for op in traced.layer_list if op.is_compute_op]
    position: dict[str, int | None] = {op.layer_label: i for i, op in enumerate(order)}
    position["input_1"] = None
    expected = [
        Node(_word_of_torchlens(op), op.shape, tuple(position[one] for one in op.parents if one in position))
        for op in order
    ]
    assert [(node.type, node.shape) for node in nodes] == [(node.type, node.shape) for node in expected]
    edges = [sorted(node.producers, key=str) for node in nodes]
    assert edges == [sorted(node.producers, key=str) for node in expected]  # it gives parents in any order


def _word_of_torchlens(op: Any) -> str:
    word = op.func_name.removesuffix("_").strip("_")
    return {"flatten": "reshape", "iadd": "add"}.get(word, word)


# ---- autograd's own graph ----


def test_backward_ops_and_their_edges_are_those_of_autograds_graph(
    model: nn.Module, images: Tensor, graph: Graph
) -> None:
    order = _executed(model(images).sum())
    position = {node: i for i, node in enumerate(order)}
    expected = {
        (position[node], i, position[after], j)
        for node in order
        for i, (after, j) in enumerate(node.next_functions)
        if after is not None
    }
    backward = [op for op in graph.ops if op.phase == "backward"]
    assert [op.name for op in backward] == [node.name().rpartition("::")[2] for node in order]
    assert set(_gradient_edges(graph, backward)) == expected
    assert len(expected) > 300


def _executed(loss: Tensor) -> list[Any]:
    """The nodes that a backward pass runs, in its order, told by hooks at each."""
    assert loss.grad_fn is not None
    order: list[Any] = []
    waiting: list[Any] = [loss.grad_fn]
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        node.register_prehook(lambda _, node=node: order.append(node))
        new = [after for after, _ in node.next_functions if after is not None and after not in found]
        found.update(new)
        waiting += dict.fromkeys(new)
    loss.backward()
    return order


def _gradient_edges(graph: Graph, backward: list[Op]) -> Iterator[tuple[int, int, int, int]]:
    """Which output of which op enters which input of which."""
    position = {op.index: i for i, op in enumerate(backward)}
    for op in backward:
        for j, entering in enumerate(op.inputs):
            for index in entering if isinstance(entering, tuple) else (entering,):
                assert index is not None
                maker = graph.tensors[index].producer
                if maker in position:
                    assert maker is not None
                    yield position[maker], graph.ops[maker].outputs.index(index), position[op.index], j


def test_each_backward_op_belongs_to_the_forward_op_that_made_its_node(graph: Graph) -> None:
    by_type: dict[str, list[str]] = {
        "ConvolutionBackward0": ["conv2d"], "NativeBatchNormBackward0": ["batch_norm"],
        "ReluBackward0": ["relu"], "AddBackward0": ["add"], "AddmmBackward0": ["linear"],
        "TBackward0": ["linear"],
    }  # fmt: skip
    seen = Counter[str]()
    for op in graph.ops:
        if op.name in by_type:
            assert op.forward is not None
            assert graph.ops[op.forward].type in by_type[op.name]
            seen[op.name] += 1
    assert (seen["ConvolutionBackward0"], seen["ReluBackward0"], seen["AddBackward0"]) == (53, 49, 16)


# ---- TensorFlow ----


KERAS = {"conv2d": 53, "relu": 49, "max_pool2d": 1, "matmul": 1}
SHAPE = (64, 64, 3)


def assert_is_resnet(graph: Graph, operations: Sequence[Any]) -> None:
    """The counts of the paper, and for each op the inputs that TensorFlow's operation of that name has."""
    found = Counter(op.type for op in graph.ops)
    assert {kind: found[kind] for kind in KERAS} == KERAS
    residual = [op for op in graph.ops if op.type == "add" and re.search(r"block\d_add", op.name)]
    assert len(residual) == COMPUTED["add"]
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
    assert sum(op.type == "batch_norm" for op in tracer.graph.ops) == COMPUTED["batch_norm"]

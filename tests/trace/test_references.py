"""Forward graphs, op by op, beside those of torch.fx and TorchLens."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import children
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import amanda
from amanda.tools.trace import Graph, Op, TraceTool

pytestmark = pytest.mark.slow

COMPUTED = {"conv2d": 53, "batch_norm": 53, "relu": 49, "add": 16, "max_pool2d": 1, "linear": 1}


class Node(NamedTuple):
    """One op of a forward pass. producers: which ops made its inputs; None: the model's own input."""

    type: str
    shape: tuple[int | None, ...] | None
    producers: tuple[int | None, ...]


@pytest.fixture(scope="module")
def nodes(graph: Graph) -> list[Node]:
    """The model's own ops: those of the loss come last."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    assert [op.type for op in forward[-2:]] == ["sum", "ones_like"]
    return [_node(graph, op, op.type) for op in forward[:-2]]


def _node(graph: Graph, op: Op, word: str) -> Node:
    data = [one.producer for one in graph.inputs(op) if one.kind in ("activation", "input")]
    return Node(word, graph.outputs(op)[0].shape, tuple(data))


def test_the_model_has_the_ops_that_its_paper_says(nodes: list[Node]) -> None:
    found = Counter(node.type for node in nodes)
    assert {kind: found[kind] for kind in COMPUTED} == COMPUTED
    assert len(nodes) == sum(COMPUTED.values()) + 2  # the pooling at the end, and a reshape


def test_ops_shapes_and_edges_are_those_of_torch_fx(
    resnet: nn.Module, images: Tensor, graph: Graph, nodes: list[Node]
) -> None:
    traced = fx.symbolic_trace(resnet)
    ShapeProp(traced).propagate(images)  # type: ignore[no-untyped-call]
    order = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    position = {node: i for i, node in enumerate(order)}
    expected = [
        Node(
            _word_of_fx(resnet, node),
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


BERT = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 99,
}  # fmt: skip


@pytest.fixture(scope="module")
def torchlens() -> dict[str, list[Node]]:
    """What TorchLens has of each model; parents come in any order, each once."""
    script = Path(__file__).with_name("torchlens_nodes.py")
    command = [sys.executable, str(script), json.dumps(BERT)]
    printed = children.run(command, check=True).stdout
    return {
        model: [Node(name, tuple(shape), tuple(producers)) for name, shape, producers in nodes]
        for model, nodes in json.loads(printed).items()
    }


def assert_equal(ours: list[Node], theirs: list[Node]) -> None:
    """Op by op: what it computes, its output's extents, and what its inputs are made by."""
    assert [(node.type, node.shape) for node in ours] == [(node.type, node.shape) for node in theirs]
    assert [set(node.producers) for node in ours] == [set(node.producers) for node in theirs]


def test_ops_shapes_and_edges_are_those_of_torchlens(
    nodes: list[Node], torchlens: dict[str, list[Node]]
) -> None:
    def word(name: str) -> str:
        word = name.removesuffix("_").strip("_")
        return {"flatten": "reshape", "iadd": "add"}.get(word, word)

    assert_equal(nodes, [node._replace(type=word(node.type)) for node in torchlens["resnet50"]])


def test_bert_has_the_ops_shapes_and_edges_of_torchlens(
    bert: Callable[..., nn.Module], torchlens: dict[str, list[Node]]
) -> None:
    model, tracer = bert(**BERT).eval(), TraceTool()
    tokens = torch.randint(0, 99, (2, 7))
    with amanda.apply(tracer), torch.no_grad():
        model(tokens)
    ours = [_node(tracer.graph, op, op.name) for op in tracer.graph.ops]
    assert_equal(ours, torchlens["bert"])
    assert sum(node.type == "scaled_dot_product_attention" for node in ours) == 2

"""Backward graphs, edge by edge, beside autograd's own, walked through `next_functions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.trace import Graph, Op, TraceTool


def test_backward_ops_and_edges_are_those_of_autograds_graph(
    resnet: nn.Module, images: Tensor, graph: Graph
) -> None:
    assert assert_as_autograds(graph, resnet(images).sum()) == 353


def assert_as_autograds(graph: Graph, loss: Tensor) -> int:
    """The same ops in the same order, and the same edges; how many of these."""
    order = _executed(loss)
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
    return len(expected)


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
                maker = None if index is None else graph.tensors[index].producer
                if maker is not None and index is not None and maker in position:
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


def cell() -> Callable[[], Tensor]:
    one, steps = nn.GRUCell(4, 5), torch.rand(6, 2, 4)

    def program() -> Tensor:
        state = torch.zeros(2, 5)
        for step in steps:
            state = one(step, state)
        return state.sum()

    return program


def recurrent() -> Callable[[], Tensor]:
    model, x = nn.LSTM(4, 5, num_layers=2, bidirectional=True), torch.rand(6, 2, 4)
    return lambda: model(x)[0].sum()


def transformer() -> Callable[[], Tensor]:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x = torch.rand(1, 3, 4, requires_grad=True)
    return lambda: model(x).sum()


def slices() -> Callable[[], Tensor]:
    layer, x = nn.Linear(4, 4), torch.rand(4, 4)

    def program() -> Tensor:
        y = layer(x)
        rows = torch.zeros(4, 4)
        rows[0] = y[0] * 0
        rows[1] = y[1] * 1
        rows[2] = y[2] * 2
        rows[3] = y[3] * 3
        z = y.clone()
        z[:, 1:3].mul_(2)
        z.relu_()
        a, b = z.chunk(2, 1)
        return (torch.cat([b, a, b], 1)[:, :4] @ rows + y).sum()

    return program


@pytest.mark.parametrize("make", [cell, recurrent, transformer, slices])
def test_edges_of_other_programs_are_those_of_autograds_graph(
    make: Callable[[], Callable[[], Tensor]],
) -> None:
    assert_program(make())


def test_calls_of_backward_ops_of_a_loop_are_those_that_autograd_makes() -> None:
    layer, x = nn.Linear(4, 4), torch.rand(4, 4)

    def program() -> Tensor:
        y, rows = layer(x), torch.zeros(4, 4)
        for i in range(4):
            rows[i] = y[i] * i
        return rows.sum()

    tracer = TraceTool()
    with amanda.apply(tracer):
        program().backward()
    calls = Counter[str]()
    for op in tracer.graph.ops:
        if op.phase == "backward":
            calls[op.name] += op.calls or 0
    assert calls == Counter(node.name().rpartition("::")[2] for node in _executed(program()))
    assert calls["MulBackward0"] == 4


def test_edges_of_bert_in_training_are_those_of_autograds_graph(bert: Callable[..., nn.Module]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model, tokens = bert(num_hidden_layers=2, vocab_size=99, **sizes), torch.randint(0, 99, (2, 7))
    assert_program(lambda: model(tokens)[1].sum())


def assert_program(program: Callable[[], Tensor]) -> None:
    tracer = TraceTool()
    torch.manual_seed(0)
    with amanda.apply(tracer):
        program().backward()
    torch.manual_seed(0)
    assert assert_as_autograds(tracer.graph, program()) > 20

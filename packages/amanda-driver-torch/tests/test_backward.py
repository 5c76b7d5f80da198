"""Backward ops: each node of the graph is found and mapped to its forward op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import same
from torch import Tensor
from torch.autograd.graph import Node

import amanda

Applied = Callable[..., Any]


def nodes_below(root: Node) -> set[Node]:
    nodes, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += [child for child, _ in node.next_functions if child is not None]
    return nodes


P = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
BATCH = torch.ones(2, 5, 3, requires_grad=True)
HEADS = torch.ones(1, 2, 5, 4, requires_grad=True)
torch.manual_seed(0)
LINEAR, RNN, LSTM = torch.nn.Linear(3, 4), torch.nn.RNN(3, 4), torch.nn.LSTM(3, 4, 2, bidirectional=True)
GRU, ATTENTION = torch.nn.GRU(3, 4), torch.nn.MultiheadAttention(3, 3)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] * 2, grads[1] * 3


def split() -> Tensor:
    upper, lower = P.split(2)
    return torch.stack([upper.sum(), lower.sum()])


def in_place() -> Tensor:
    y = P * 2
    y[0] = P[1] * 3
    y[1:].mul_(2)
    return y.relu_()


def view_of_a_changed_base() -> Tensor:
    y = P * 2
    view = y.view(-1)
    y.add_(1)
    return view


def changed_view() -> Tensor:
    y = P * 2
    row, turned = y[0], y.T
    row.exp_()
    return turned * y.T


GRAPHS: dict[str, Callable[[], Tensor]] = {
    "linear 2D": lambda: LINEAR(BATCH[0]),
    "linear 3D": lambda: LINEAR(BATCH),
    "rnn": lambda: RNN(BATCH)[0],
    "lstm": lambda: LSTM(BATCH)[0],
    "gru": lambda: GRU(BATCH)[1],
    "attention": lambda: ATTENTION(BATCH, BATCH, BATCH)[0],
    "sdpa": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS),
    "split": split,
    "unbind": lambda: torch.stack([*P.unbind()]),
    "max": lambda: P.max(1).values,
    "shared input": lambda: P * P,
    "shared parameter": lambda: F.linear(BATCH, P) + F.linear(BATCH, P).relu(),
    "in place": in_place,
    "view of a changed base": view_of_a_changed_base,
    "changed view": changed_view,
    "function": lambda: torch.stack(Double.apply(P, P)),
    "einsum": lambda: torch.einsum("ij,kj->ik", P, P),
    "cross entropy": lambda: F.cross_entropy(P, torch.tensor([0, 1, 2, 0])),
    "index": lambda: P[P > 0],
    "where": lambda: torch.where(P > 0, P, -P),
    "norm": lambda: F.batch_norm(P, torch.zeros(3), torch.ones(3), training=True),
    "fft": lambda: torch.fft.fft(P).real,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_is_found_once_and_again_by_the_same_id(name: str, backward_ops: Any) -> None:
    tool, nodes = backward_ops(), 0
    with amanda.apply(tool):
        for _ in range(2):
            loss = GRAPHS[name]().sum()
            assert loss.grad_fn is not None
            nodes = len(nodes_below(loss.grad_fn))
            loss.backward()
    assert len(tool.pairs) == nodes == len(set(tool.ids))


MAPPED = {
    "linear 3D": ("linear", {"ViewBackward0", "AddmmBackward0", "TBackward0", "AccumulateGrad"}),
    "sdpa": (
        "scaled_dot_product_attention", {"ScaledDotProductFlashAttentionForCpuBackward0", "AccumulateGrad"},
    ),
    "rnn": (
        "rnn_tanh", {"StackBackward0", "TanhBackward0", "AddBackward0", "AddmmBackward0", "TBackward0",
                     "UnbindBackward0", "ViewBackward0", "AccumulateGrad"},
    ),
    "split": ("split", {"SplitBackward0", "AccumulateGrad"}),
    "max": ("max", {"MaxBackward0", "AccumulateGrad"}),
    "function": ("Double", {"DoubleBackward", "AccumulateGrad"}),
    "in place": ("__setitem__", {"CopySlices"}),
    "changed view": ("exp_", {"CopySlices"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_a_forward_op_has_the_backward_ops_of_its_nodes(
    name: str, backward_ops: Any, applied: Applied
) -> None:
    forward, expected = MAPPED[name]
    tool = backward_ops()
    applied(tool, lambda: GRAPHS[name]().sum().backward())
    backward_names = {backward for op, backward in tool.pairs if op == forward}
    # Nodes that only some versions of torch have.
    assert backward_names - {"UnsqueezeBackward0", "TransposeBackward0", "UnsafeViewBackward0"} == expected


@pytest.mark.parametrize("name", GRAPHS)
def test_a_tool_that_changes_nothing_leaves_gradients_bit_identical(name: str, applied: Applied) -> None:
    leaves = [P, BATCH, HEADS, *(p for m in (LINEAR, RNN, LSTM, GRU, ATTENTION) for p in m.parameters())]

    def program() -> Any:
        return torch.autograd.grad(GRAPHS[name]().sum(), leaves, allow_unused=True)

    def record(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: None)
        context.insert_after_backward_op(lambda *grads: list(grads))

    tool = amanda.Tool()
    tool.add_inst_for_op(record, backward=True)
    for gradient, expected in zip(applied(tool, program), program(), strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            same(gradient, expected)

"""`get_op_type()` is the ATen operator that a call reaches, however it is spelt."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda

X = torch.rand(3, 3)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


@torch.library.custom_op("amanda_op_type::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def outermost_type(call: Callable[[], Any]) -> str:
    op_types: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: op_types.append(context.get_op_type()))
    with amanda.apply(tool):
        call()
    return op_types[0]


@pytest.mark.parametrize(
    ("call", "op_type"),
    [
        (lambda: X + X, "add"),
        (lambda: 1 + X, "add"),
        (lambda: torch.add(X, X), "add"),
        (lambda: torch.ops.aten.add(X, X), "add"),
        (lambda: torch.ops.aten.add.Tensor(X, X), "add"),
        (lambda: X.clone().add_(X), "clone"),
        (lambda: -X, "neg"),
        (lambda: X @ X, "matmul"),
        (lambda: torch.mm(X, X), "mm"),
        (lambda: torch.spmm(X, X), "mm"),
        (lambda: torch.dsmm(X, X), "mm"),
        (lambda: X.T, "numpy_T"),
        (lambda: X[0], "getitem"),
        (lambda: Double.apply(X), "Double"),
        (lambda: torch.ops.amanda_op_type.twice(X), "amanda_op_type::twice"),
    ],
)
def test_every_spelling_has_one_type(call: Callable[[], Any], op_type: str) -> None:
    assert outermost_type(call) == op_type

"""The backward actions: gradients changed before, after, and instead of a backward op."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import leaf, same
from torch import Tensor

import amanda

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]


def test_gradients_are_changed_before_and_after_a_backward_op(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    for action in ("insert_before_backward_op", "insert_after_backward_op"):
        tool = acting(action, "ExpBackward0", lambda grad: grad * 3)
        (grad,) = applied(tool, lambda: torch.autograd.grad(x.exp().sum(), x))
        same(grad, x.detach().exp() * 3)


def test_a_backward_op_is_replaced(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    tool = acting("replace_backward_op", "ExpBackward0", lambda grad: torch.full_like(grad, 7))
    (grad,) = applied(tool, lambda: torch.autograd.grad(x.exp().sum(), x))
    same(grad, torch.full((2,), 7.0))


@pytest.mark.parametrize("full", [True, False])
def test_a_replacement_gives_all_gradients_or_those_wanted(full: bool, acting: Act, applied: Applied) -> None:
    weight, bias = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)

    def routine(grad: Tensor) -> list[Tensor]:
        of_bias, of_weight = torch.full((2,), 5.0), torch.full((3, 2), 7.0)
        return [of_bias, torch.zeros(4, 3), of_weight] if full else [of_bias, of_weight]

    tool = acting("replace_backward_op", "AddmmBackward0", routine)
    grads = applied(
        tool, lambda: torch.autograd.grad(F.linear(torch.ones(4, 3), weight, bias).sum(), [weight, bias])
    )
    same(grads, (torch.full((2, 3), 7.0), torch.full((2,), 5.0)))


def test_a_replacement_with_another_number_of_gradients_is_an_error(acting: Act) -> None:
    x = leaf(1, 2)
    tool = acting("replace_backward_op", "MulBackward0", lambda grad: [grad] * 3)
    with (
        pytest.raises(amanda.AmandaError, match=r"returned 3 gradients; MulBackward0 gives 2"),
        amanda.apply(tool),
    ):
        (x * 2).sum().backward()


def test_the_gradient_of_a_leaf_is_changed_before_it_is_accumulated(acting: Act, applied: Applied) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    tool = acting("insert_before_backward_op", "AccumulateGrad", lambda grad: grad * 100)
    applied(tool, lambda: (p * 2).sum().backward())
    same(p.grad, torch.full((2,), 600.0))


def test_a_leaf_cannot_be_replaced(acting: Act) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    tool = acting("replace_backward_op", "AccumulateGrad", lambda grad: grad)
    with (
        pytest.raises(amanda.AmandaError, match="AccumulateGrad cannot be replaced") as raised,
        amanda.apply(tool),
    ):
        (p * 2).sum().backward()
    assert "of AccumulateGrad (op 0x" in raised.value.__notes__[0]


def leaf_owner(program: Callable[[], Tensor], *tools: amanda.Tool) -> list[str]:
    owners: list[str] = []

    def note(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            owners.append(context.get_op().__name__)

    tool = amanda.Tool()
    tool.add_inst_for_op(note, backward=True)
    with amanda.apply(*tools, tool):
        program().sum().backward()
    return owners


def test_a_leaf_belongs_to_the_op_that_used_it_first() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    assert leaf_owner(lambda: p.sin() * p) == ["sin"]


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.differentiable])
def test_a_leaf_is_found_behind_the_value_of_a_routine(mark: Any, acting: Act) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    mask = acting("insert_before_op", "linear", mark(lambda weight: weight * 0.5 + 1), inputs=["weight"])
    assert leaf_owner(lambda: F.linear(torch.ones(1, 3), weight), mask) == ["linear"]


def test_a_leaf_of_an_op_outside_the_scope_belongs_to_none() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    y = p.sin()
    assert leaf_owner(lambda: y * 2) == []


def test_an_exception_in_the_backward_pass_tells_the_line_of_the_forward_op(
    acting: Act,
) -> None:
    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("mine")

    x, tool = leaf(1), acting("insert_before_backward_op", "ExpBackward0", fail)
    with amanda.apply(tool):
        y = x.exp().sum()
    with pytest.raises(ZeroDivisionError, match="mine") as raised, amanda.apply(tool):
        y.backward()
    line = fail.__code__.co_firstlineno + 5
    assert raised.value.__notes__[0].endswith(f"called from {__file__}:{line})")

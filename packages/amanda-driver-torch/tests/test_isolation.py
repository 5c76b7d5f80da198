"""Isolation from autodiff: straight through by default, a part of it where marked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import leaf, same
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import amanda

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]

MASK = torch.tensor([1.0, 0.0, 1.0])


def masked(weight: Tensor) -> Tensor:
    return weight * MASK


def scaled(x: Tensor, *gradients: Any) -> Any:
    return (x * 10, *gradients) if gradients else x * 10


def linear_grads() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    (F.linear(x, weight) ** 2).sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
    return weight.grad, x.grad


def linear_grads_by_hand(mask_in_graph: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    masked = weight * MASK if mask_in_graph else (weight * MASK).detach().requires_grad_()
    (F.linear(x, masked) ** 2).sum().backward()
    grad = weight.grad if mask_in_graph else masked.grad
    assert grad is not None
    assert x.grad is not None
    return grad, x.grad


def test_a_masked_weight_has_the_gradient_of_the_mask_s_value(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "linear", masked, inputs=["weight"])
    weight_grad, x_grad = applied(tool, linear_grads)
    same((weight_grad, x_grad), linear_grads_by_hand(mask_in_graph=False))
    assert weight_grad[:, 1].abs().min() > 0


@pytest.mark.parametrize("way", ["decorator", "switch"])
def test_a_differentiable_mask_has_the_gradient_of_autograd(way: str, acting: Act, applied: Applied) -> None:
    if way == "decorator":
        routine = amanda.differentiable(lambda weight: weight * MASK)
        result = applied(acting("insert_before_op", "linear", routine, inputs=["weight"]), linear_grads)
    else:
        with amanda.autodiff_enabled():
            result = applied(acting("insert_before_op", "linear", masked, inputs=["weight"]), linear_grads)
    same(result, linear_grads_by_hand(mask_in_graph=True))


@pytest.mark.parametrize("point", ["insert_before_op", "insert_after_op", "replace_op"])
@pytest.mark.parametrize("routine", [lambda x: x * x, lambda x: x.sin() + x])
def test_finite_differences_agree_with_a_differentiable_routine(
    point: str, routine: Any, acting: Act
) -> None:
    x = torch.linspace(-1, 1, 3, dtype=torch.double).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) * x

    with amanda.apply(acting(point, "tanh", amanda.differentiable(routine))):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("point", ["insert_before_op", "insert_after_op"])
def test_finite_differences_agree_where_a_routine_shifts(point: str, acting: Act) -> None:
    x = torch.linspace(-1, 1, 3, dtype=torch.double).requires_grad_()
    with amanda.apply(acting(point, "sin", lambda x: x + 0.25)):
        assert torch.autograd.gradcheck(lambda x: torch.sin(x) * x, x)
        assert torch.autograd.gradgradcheck(lambda x: torch.sin(x) * x, x)


def test_the_op_is_differentiated_at_the_value_of_the_routine(acting: Act, applied: Applied) -> None:
    x, step = torch.linspace(-1, 1, 3, dtype=torch.double), 1e-6
    difference = (torch.tanh(x * 2 + step) - torch.tanh(x * 2 - step)) / (2 * step)
    x.requires_grad_()
    tool = acting("insert_before_op", "tanh", lambda x: x * 2)
    (grad,) = applied(tool, lambda: torch.autograd.grad(torch.tanh(x).sum(), x))
    assert_close(grad, difference, rtol=1e-8, atol=1e-8)  # rounding of the difference


def test_straight_through_is_the_identity_to_the_second_order_too(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)

    def program() -> tuple[Tensor, Tensor]:
        (grad,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        return grad, second

    grad, second = applied(acting("insert_before_op", "pow", lambda x: x * 2, inputs=[0]), program)
    same(grad, torch.tensor([12.0, 48.0]))
    same(second, torch.tensor([12.0, 24.0]))


def test_a_value_changed_in_one_place_leaves_the_same_tensor_in_another(
    acting: Act, applied: Applied
) -> None:
    p = torch.nn.Parameter(torch.tensor([2.0]))

    def program() -> tuple[float, Tensor]:
        y = torch.mul(p, p)
        return y.item(), torch.autograd.grad(y, p)[0]

    value, grad = applied(acting("insert_before_op", "mul", lambda x: x * 10, inputs=[0]), program)
    assert value == 40
    same(grad, torch.tensor([22.0]))


def test_an_undefined_gradient_stays_undefined_behind_a_changed_value(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)

    def program() -> Any:
        return torch.autograd.grad(torch.linalg.vector_norm(x, 0), x, allow_unused=True)

    assert program() == (None,)
    assert applied(acting("insert_after_op", "linalg_vector_norm", lambda y: y * 2), program) == (None,)


def test_each_tensor_of_a_list_has_its_own_straight_edge(acting: Act, applied: Applied) -> None:
    x, y = leaf(1, 1), leaf(1, 1)

    def program() -> Any:
        return torch.autograd.grad(torch.cat([x, y]).dot(torch.arange(4.0)), [x, y])

    expected = program()
    tool = acting("insert_before_op", "cat", lambda tensors: [tensors[0] * 2, tensors[1]], inputs=[0])
    same(applied(tool, program), expected)


@pytest.mark.parametrize("op", ["split", "unbind"])
def test_an_output_of_many_has_its_own_straight_edge(op: str, acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)

    def program() -> Tensor:
        first, second = x.split(1) if op == "split" else x.unbind()
        return torch.autograd.grad((first * second).sum(), x)[0]

    tool = acting("insert_after_op", op, lambda first, second: (first * 10, second))
    same(applied(tool, program), torch.tensor([2.0, 10.0]))


def test_an_unchanged_value_adds_no_node(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    result = applied(acting("insert_after_op", "relu", lambda y: y), lambda: torch.relu(x))
    assert result.grad_fn.name() == "ReluBackward0"
    assert result.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


def test_a_type_that_is_cast_back_has_its_gradient_in_the_first_type(acting: Act, applied: Applied) -> None:
    x = leaf(1, 2)
    tool = acting("insert_before_op", "exp", lambda x: x.double() * 0)
    (grad,) = applied(tool, lambda: torch.autograd.grad(x.exp().sum(), x))
    same(grad, torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at first use
def test_forward_mode_passes_straight_through(acting: Act, applied: Applied) -> None:
    x = torch.tensor([1.0, 2.0])

    def program() -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), torch.ones(2))
            return torch.autograd.forward_ad.unpack_dual(torch.square(dual)).tangent.detach()

    expected = program() * 10
    same(applied(acting("insert_before_op", "square", scaled), program), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at first use
@pytest.mark.parametrize("name", ["mul", "mul_"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_tangent_passes_a_routine_straight_through(acting: Act, name: str, trained: bool) -> None:
    primal = torch.tensor([1.0, 2.0], requires_grad=trained)
    with amanda.apply(acting("insert_after_op", name, lambda result: result * 10)):
        for _ in range(2):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(primal, torch.tensor([3.0, 5.0]))
                value, tangent = forward_ad.unpack_dual(getattr(dual + 0, name)(2))
                assert value.tolist() == [20.0, 40.0]
                assert tangent is not None
                assert tangent.tolist() == [6.0, 10.0]

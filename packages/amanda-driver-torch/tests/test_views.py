"""Writes reach views, bases and the values that routines give in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import copied
from torch import Tensor
from view_programs import PROGRAMS, Program, gradient_of_nested, write_copies_of_parts

import amanda
from amanda.testing import EqualCopies


class Times(amanda.Tool):
    """Gives each op's floating outputs times one, or each of its views times another number."""

    def __init__(self, factor: float = 1.0, only: str = "") -> None:
        self.factor, self.only = factor, only
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if self.only in ("", context.get_op_type()):
            context.insert_after_op(self.times)

    def times(self, *values: Any) -> Any:
        """Return the values, the floating tensors among them multiplied."""
        return [value * self.factor if is_floating(value) else value for value in values]


class InModule(torch.nn.Module):
    """A program whose ops are the same at each call: native code runs them from the third on."""

    def __init__(self, program: Callable[[], Any]) -> None:
        super().__init__()
        self.forward = program


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make_tool", [Times, lambda: EqualCopies(copied)], ids=["after", "everywhere"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equal_values_leave_a_program_as_it_is(
    program: Program, make_tool: Callable[[], amanda.Tool]
) -> None:
    expected = program()
    tool, module = make_tool(), InModule(program)
    with amanda.apply(tool) as scope:
        for _ in range(5):
            assert torch.equal(module(), expected)
    assert torch.equal(program(), expected)
    assert not scope.report


class Packed(amanda.Tool):
    """Gives each op contiguous copies of the tensors that it reads."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_before_op(self.packed))

    def packed(self, *values: Any) -> Any:
        """Return contiguous copies, but leaves as they are."""
        return [
            value.clone(memory_format=torch.contiguous_format)
            if is_floating(value) and value.grad_fn
            else value
            for value in values
        ]


def test_an_op_copies_a_value_of_another_layout_where_it_copies_the_tensor() -> None:
    expected, module = write_copies_of_parts(), InModule(write_copies_of_parts)
    with amanda.apply(Packed()):
        for _ in range(5):
            assert torch.equal(module(), expected)


def test_a_changed_view_is_what_its_readers_see_and_its_base_keeps_its_values() -> None:
    base = torch.ones(4)
    with amanda.apply(Times(3.0, "view")):
        view = base.view(2, 2)
        assert view.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert base.tolist() == [1.0] * 4


def test_a_write_into_a_changed_view_reaches_the_elements_that_it_writes() -> None:
    base = torch.ones(4)
    with amanda.apply(Times(3.0, "view")):
        view = base.view(2, 2)
        view[0] += 1
        assert base.tolist() == [4.0, 4.0, 1.0, 1.0]
        base[3] = 8
        assert view.tolist() == [[4.0, 4.0], [3.0, 8.0]]


def test_a_parameter_keeps_its_values_where_a_view_of_it_is_changed() -> None:
    layer = torch.nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    with amanda.apply(Times(3.0, "t")):
        torch.mm(torch.ones(1, 2), layer.weight.t()).sum().backward()
    assert torch.equal(layer.weight.detach(), before)


def test_a_value_that_stays_changed_after_the_scope_is_reported() -> None:
    base = torch.ones(4)
    with amanda.apply(Times(3.0, "view")) as scope:
        view = base.view(2, 2)
    view.add_(1)
    assert base.tolist() == [1.0] * 4
    (entry,) = scope.report
    assert "result of view" in entry.what
    assert "no longer share memory" in entry.reason


def test_an_equal_value_is_a_view_again_after_the_scope() -> None:
    base = torch.ones(4)
    with amanda.apply(Times(1.0, "view")) as scope:
        view = base.view(2, 2)
    view.add_(1)
    assert base.tolist() == [2.0] * 4
    assert not scope.report


def test_a_constant_given_for_two_views_ties_them_not_to_each_other() -> None:
    constant = torch.full((2,), 5.0)

    class Constant(Times):
        def times(self, *values: Any) -> Any:
            return constant

    first, second = torch.zeros(4), torch.zeros(4)
    with amanda.apply(Constant(only="chunk")), pytest.raises(amanda.errors.RoutineError):
        first.chunk(2)
    with amanda.apply(Constant(only="narrow")):
        first_view, second_view = first.narrow(0, 0, 2), second.narrow(0, 0, 2)
        first_view.add_(1)
        assert second_view.tolist() == [5.0, 5.0]
        assert second.tolist() == [0.0] * 4
        assert first.tolist() == [6.0, 6.0, 0.0, 0.0]


def test_a_leaf_that_is_made_in_a_scope_is_a_leaf() -> None:
    with amanda.apply(Times(2.0, "ones")):
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 3).sum().backward()
    assert leaf.is_leaf
    assert leaf.tolist() == [2.0, 2.0]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0]


def test_views_are_let_go_with_the_values_given_for_them() -> None:
    driver = amanda.scope.attachment.attachment.driver(amanda.drivers.torch.TorchDriver)
    with amanda.apply(Times()):
        base = torch.zeros(4)
        for _ in range(50):
            base.view(2, 2)[0].t().unsqueeze(0).add_(1)
        assert len(driver.views._label_by_tie) <= 2
    assert not driver.views


def test_an_input_that_a_function_marks_dirty_is_written_where_a_routine_gave_another_value() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Before(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: context.insert_before_op(self.same))

        def same(self, *values: Any) -> Any:
            return [value * 1.0 if is_floating(value) else value for value in values]

    leaf = torch.ones(2, requires_grad=True)
    with amanda.apply(Before()):
        x = leaf + 0
        y = Doubles.apply(x)
        y.sum().backward()
    assert y is x
    assert x.tolist() == [2.0, 2.0]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0]


def test_an_expanded_tensor_that_an_op_writes_takes_equal_values_and_refuses_others() -> None:
    x = torch.zeros(2, 3)
    with amanda.apply(Times(1.0, "set_")):
        x.set_(torch.arange(3.0).untyped_storage(), 0, (2, 3), (0, 1))
    assert x.tolist() == [[0.0, 1.0, 2.0]] * 2

    class Rows(Times):
        def times(self, *values: Any) -> Any:
            return [values[0] + torch.tensor([[0.0], [1.0]])]

    with amanda.apply(Rows(only="set_")), pytest.raises(amanda.errors.RoutineError, match="one in memory"):
        x.set_(torch.arange(3.0).untyped_storage(), 0, (2, 3), (0, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_pass_values_given_for_nested_tensors() -> None:
    expected = gradient_of_nested()
    with amanda.apply(Times()):
        for _ in range(3):
            assert torch.equal(gradient_of_nested(), expected)


class Held:
    """An object that gives the tensor that it holds as the result of each op."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        tensor: Tensor = args[0].tensor
        return tensor


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_gradient_reaches_a_leaf_that_an_object_hands_over(factor: float) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with amanda.apply(Times(factor, "linalg_eigvalsh")):
        values = torch.linalg.eigvalsh(Held(leaf))  # type: ignore[arg-type]
        assert torch.equal(values, torch.full((3,), factor))
        (values * 2).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))


def add_one(x: Tensor) -> None:
    x.add_(1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("make_tool", [Times, lambda: EqualCopies(copied)], ids=["after", "everywhere"])
def test_a_view_sees_what_a_script_writes(make_tool: Callable[[], amanda.Tool]) -> None:
    base, script = torch.zeros(4), torch.jit.script(add_one)
    with amanda.apply(make_tool()):
        view = base[:2]
        for _ in range(4):
            script(base)
        script(view)
        assert view.tolist() == [5.0, 5.0]
    assert base.tolist() == [5.0, 5.0, 4.0, 4.0]


def test_a_changed_value_for_part_of_a_sparse_tensor_leaves_it_and_takes_its_writes() -> None:
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    with amanda.apply(Times(2.0, "values")):
        values = sparse.values()
        assert values.tolist() == [4.0, 6.0]
        assert sparse.to_dense().tolist() == [[0.0, 2.0], [3.0, 0.0]]
        values[0] = 7.0
        assert sparse.to_dense().tolist() == [[0.0, 7.0], [3.0, 0.0]]

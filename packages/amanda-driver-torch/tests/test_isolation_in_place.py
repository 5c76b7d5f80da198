"""Isolation from autodiff where an op writes, and on views."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaves import leaf, same
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.drivers.torch._saved_tensors import SavedTensor

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]


def scaled(x: Tensor) -> Tensor:
    return x * 10


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": lambda x: x.relu_(),
    "exp_": lambda x: x.exp_(),
    "sigmoid_": lambda x: x.sigmoid_(),
    "tanh_": lambda x: x.tanh_(),
    "mul_": lambda x: x.mul_(3),
    "pow_": lambda x: x.pow_(3),
    "elu_": lambda x: torch.nn.functional.elu_(x),
    "leaky_relu_": lambda x: torch.nn.functional.leaky_relu_(x),
    "dropout_": lambda x: torch.dropout_(x, 0.0, True),
    "add_": lambda x: x.add_(torch.ones(2)),
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_a_value_after_an_in_place_op_leaves_its_gradient(op: str, acting: Act, applied: Applied) -> None:
    x = leaf(-1, 2)

    def program() -> tuple[Tensor, Tensor]:
        y = IN_PLACE[op](x * 2)
        return y.detach().clone(), torch.autograd.grad(y.sum(), x)[0]

    value, grad = program()
    same(applied(acting("insert_after_op", op, scaled), program), (value * 10, grad))
    routine = amanda.differentiable(lambda y: y * 10)
    result = applied(acting("insert_after_op", op, routine), program)
    assert_close(result, (value * 10, grad * 10))  # the factor is applied at another place


@pytest.mark.parametrize("op", IN_PLACE)
def test_an_in_place_op_is_differentiated_at_the_value_before_it(
    op: str, acting: Act, applied: Applied
) -> None:
    x = leaf(-1, 2)

    def program(scale: float = 1) -> tuple[Tensor, Tensor]:
        y = IN_PLACE[op](x * scale)
        return y.detach().clone(), torch.autograd.grad(y.sum(), x)[0]

    value, grad = program(10)
    tool = acting("insert_before_op", op, lambda x: x * 10, inputs=[0])
    assert_close(applied(tool, program), (value, grad / 10))  # as above
    tool = acting("insert_before_op", op, amanda.differentiable(lambda x: x * 10), inputs=[0])
    assert_close(applied(tool, program), (value, grad))


def test_an_in_place_replacement_takes_part_in_autodiff(acting: Act, applied: Applied) -> None:
    x = leaf(-1, 2)
    tool = acting("replace_op", "relu_", lambda y: y * y)
    (grad,) = applied(tool, lambda: torch.autograd.grad((x * 3).relu_().sum(), x))
    same(grad, torch.tensor([-18.0, 36.0]))


def test_a_value_written_into_a_view_reaches_its_base(acting: Act, applied: Applied) -> None:
    x = leaf(1, 1, 1, 1)

    def program() -> tuple[Tensor, Tensor]:
        y = x * 1
        y[:2].mul_(3)
        return y.detach().clone(), torch.autograd.grad(y.sum(), x)[0]

    value, grad = applied(acting("insert_after_op", "mul_", scaled), program)
    same(value, torch.tensor([30.0, 30.0, 1.0, 1.0]))
    same(grad, torch.tensor([3.0, 3.0, 1.0, 1.0]))


def test_a_value_in_place_of_a_view_may_be_written_into(acting: Act, applied: Applied) -> None:
    x = leaf(1, 1)

    def program() -> Tensor:
        view = (x * 1).view(2)
        view.mul_(3)
        return torch.autograd.grad(view.sum(), x)[0]

    same(applied(acting("insert_after_op", "view", scaled), program), torch.tensor([3.0, 3.0]))


def test_an_assigned_value_has_a_straight_edge(acting: Act, applied: Applied) -> None:
    x = leaf(1, 1)

    def program() -> tuple[Tensor, Tensor]:
        y = torch.zeros(2)
        y[0] = x[1] * 5
        return y.detach().clone(), torch.autograd.grad(y.sum(), x)[0]

    value, grad = applied(acting("insert_before_op", "__setitem__", scaled, inputs=["value"]), program)
    same(value, torch.tensor([50.0, 0.0]))
    same(grad, torch.tensor([0.0, 5.0]))


def test_an_in_place_op_changed_after_it_differentiates_twice(acting: Act) -> None:
    x = torch.linspace(-1, 1, 3, dtype=torch.double).requires_grad_()
    tool = acting("insert_after_op", "exp_", amanda.differentiable(lambda y: y * 3))
    with amanda.apply(tool):
        assert torch.autograd.gradcheck(lambda x: (x * 2).exp_(), x)
        assert torch.autograd.gradgradcheck(lambda x: (x * 2).exp_(), x)


def test_an_in_place_op_runs_where_saved_tensor_hooks_are_forbidden(acting: Act, applied: Applied) -> None:
    x = leaf(-1, 2)

    def program() -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("no"):
            return torch.autograd.grad((x * 2).mul_(3).sum(), x)[0]

    same(applied(acting("insert_after_op", "mul_", scaled), program), program())


def test_a_routine_recorded_when_the_outputs_are_known_runs_after_an_in_place_op_at_once() -> None:
    x, tool = leaf(-1, 2), amanda.Tool()

    def record(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "exp_":
            context.insert_after_op(scaled)

    tool.add_inst_for_op(record, require_outputs=True)
    with amanda.apply(tool):
        y = (x * 1).exp_()
        y.sum().backward()
    same(y.detach(), x.detach().exp() * 10)
    same(x.grad, x.detach().exp())


def test_saved_tensor_hooks_of_the_user_see_what_an_in_place_op_saves(acting: Act, applied: Applied) -> None:
    x, saved = leaf(-1, 2), []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    def program() -> tuple[Tensor, int]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
            y = (x * 1).exp_()
        return torch.autograd.grad(y.sum(), x)[0], len(saved)

    expected = program()
    assert expected[1] == 1
    same(applied(acting("insert_after_op", "exp_", scaled), program), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_in_place_ops_with_their_routines(
    reentrant: bool, acting: Act, applied: Applied
) -> None:
    x = leaf(-1, 2)

    def program(run: Callable[..., Tensor] = checkpoint) -> Tensor:
        options = {"use_reentrant": reentrant} if run is checkpoint else {}
        x.grad = None
        run(lambda x: (x * 2).exp_().sin(), x, **options).sum().backward()
        assert x.grad is not None
        return x.grad

    tool = acting("insert_after_op", "exp_", scaled)
    expected = applied(tool, lambda: program(lambda function, x: function(x)))
    same(applied(tool, program), expected)


def test_a_routine_that_only_looks_makes_nothing_be_copied() -> None:
    looks = amanda.Tool()
    looks.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: None))
    model = torch.nn.ReLU(inplace=True)
    start = torch.linspace(-1, 1, 8, requires_grad=True)
    with amanda.apply(looks):
        for _ in range(4):
            y = model(start * 1)
            assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(torch.autograd.grad(y.sum(), start)[0], (start > 0).float())


@pytest.mark.parametrize("instrumented", [False, True])
def test_what_the_user_writes_after_it_was_saved_is_an_error_in_the_backward_pass(instrumented: bool) -> None:
    looks = amanda.Tool()
    looks.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: None))
    start = torch.ones(3, requires_grad=True)
    with amanda.apply(*([looks] if instrumented else [])):
        y = (start * 2).exp_()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("write", [lambda y: y.exp_(), lambda y: y[:2].exp_()], ids=["whole", "view"])
def test_the_graph_of_an_op_in_place_is_freed_with_its_result(write: Callable[[Tensor], Tensor]) -> None:
    looks = amanda.Tool()
    looks.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: None))
    start = torch.ones(3, requires_grad=True)
    gc.collect()
    gc.disable()
    earlier = {id(item) for item in gc.get_objects() if type(item) is SavedTensor}
    try:
        with amanda.apply(looks):
            for _ in range(3):
                y = start * 2
                gone = weakref.ref(y)
                write(y)
                del y
                assert gone() is None
            assert {id(item) for item in gc.get_objects() if type(item) is SavedTensor} <= earlier
    finally:
        gc.enable()

"""Ops that write: in place, `out=`, running statistics. What a routine returns is copied in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import same
from torch import Tensor

import amanda
from amanda.testing import EqualCopies

Act = Callable[..., amanda.Tool]
Applied = Callable[..., Any]


def add_one() -> tuple[Tensor, bool]:
    x = torch.ones(2)
    result = x.add_(1)
    return x, result is x


def add_into() -> tuple[Tensor, bool]:
    out = torch.empty(2)
    result = torch.add(torch.ones(2), 1, out=out)
    return out, result is out


def write_first() -> Tensor:
    x = torch.ones(2)
    x[0] = 5
    return x


def times_ten(x: Tensor, *_: Any) -> Tensor:
    return x * 10


def assign_seven(x: Tensor, index: Any, value: Any) -> None:
    x[1] = 7


@pytest.mark.parametrize(("op", "program"), [("add_", add_one), ("add", add_into)])
def test_a_value_after_the_op_is_copied_into_the_tensor_of_the_user(
    op: str, program: Any, acting: Act, applied: Applied
) -> None:
    x, is_own = applied(acting("insert_after_op", op, times_ten), program)
    same(x, torch.full((2,), 20.0))
    assert is_own


def test_a_value_before_the_op_is_copied_into_the_tensor_of_the_user(acting: Act, applied: Applied) -> None:
    x, is_own = applied(acting("insert_before_op", "add_", times_ten, inputs=[0]), add_one)
    same(x, torch.full((2,), 11.0))
    assert is_own


def scaled_in_place(x: Tensor, *_: Any) -> Tensor:
    return x.mul_(10)


def scaled_silently(x: Tensor, *_: Any) -> None:
    x.mul_(10)


@pytest.mark.parametrize("routine", [times_ten, scaled_in_place, scaled_silently])
def test_a_replacement_of_an_in_place_op_writes_what_it_returns_or_wrote(
    routine: Any, acting: Act, applied: Applied
) -> None:
    x, is_own = applied(acting("replace_op", "add_", routine), add_one)
    same(x, torch.full((2,), 10.0))
    assert is_own


def test_an_in_place_op_can_be_removed(acting: Act, applied: Applied) -> None:
    x, is_own = applied(acting("replace_op", "add_", lambda x, other: x), add_one)
    same(x, torch.ones(2))
    assert is_own


def test_what_is_assigned_by_index_can_be_changed(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "__setitem__", lambda value: 7, inputs=["value"])
    same(applied(tool, write_first), torch.tensor([7.0, 1.0]))


def test_what_is_assigned_into_can_be_changed(acting: Act, applied: Applied) -> None:
    tool = acting("insert_before_op", "__setitem__", lambda x: x * 3, inputs=["self"])
    same(applied(tool, write_first), torch.tensor([5.0, 3.0]))


def test_an_assignment_by_index_can_be_replaced(acting: Act, applied: Applied) -> None:
    same(applied(acting("replace_op", "__setitem__", assign_seven), write_first), torch.tensor([1.0, 7.0]))


def test_an_in_place_activation_writes_the_value_of_a_routine(acting: Act, applied: Applied) -> None:
    x = torch.tensor([-1.0, 2.0])
    result = applied(
        acting("insert_after_op", "relu_", lambda y: y + 5), lambda: F.relu(x, inplace=True), runs=1
    )
    assert result is x
    same(x, torch.tensor([5.0, 7.0]))


def test_several_outs_take_the_values_of_a_routine(acting: Act, applied: Applied) -> None:
    def program() -> Any:
        out = torch.empty(0), torch.empty(0, dtype=torch.long)
        result = torch.max(torch.eye(2), 1, out=out)
        return result, out

    plain, _ = program()
    for tool in (
        acting("insert_after_op", "max", lambda values, indices: (values * 5, indices)),
        acting("replace_op", "max", lambda x, dim, out: (x.max(dim).values * 5, x.max(dim).indices)),
    ):
        result, out = applied(tool, program)
        assert type(result) is type(plain)
        assert [returned is given_out for returned, given_out in zip(result, out, strict=True)] == [
            True,
            True,
        ]
        same([*out], [torch.full((2,), 5.0), torch.tensor([0, 1])])


@pytest.mark.parametrize(
    ("action", "routine", "expected"),
    [
        ("insert_before_op", lambda tensors, *_: ([tensor * 5 for tensor in tensors], *_), 6.0),
        ("insert_after_op", lambda *tensors: [tensor * 5 for tensor in tensors], 10.0),
        ("replace_op", lambda tensors, by: [tensor * 7 for tensor in tensors], 7.0),
    ],
)
def test_each_tensor_of_a_list_that_is_written_takes_its_value(
    action: str, routine: Any, expected: float, acting: Act, applied: Applied
) -> None:
    def program() -> list[Tensor]:
        tensors = [torch.ones(2), torch.ones(3)]
        torch._foreach_add_(tensors, 1)
        return tensors

    result = applied(acting(action, "_foreach_add_", routine), program)
    same(result, [torch.full((2,), expected), torch.full((3,), expected)])


def test_running_statistics_take_the_value_of_a_routine(acting: Act, applied: Applied) -> None:
    norm = torch.nn.BatchNorm1d(2, momentum=0.0)
    tool = acting("insert_before_op", "batch_norm", lambda mean: mean + 1, inputs=["running_mean"])
    applied(tool, lambda: norm(torch.eye(2)), runs=2)
    same(norm.running_mean, torch.full((2,), 2.0))


def test_a_leaf_under_no_grad_takes_the_value_of_a_routine(acting: Act, applied: Applied) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))

    def program() -> None:
        with torch.no_grad():
            parameter.add_(1)

    applied(acting("insert_after_op", "add_", times_ten), program, runs=1)
    same(parameter.detach(), torch.full((2,), 20.0))
    assert parameter.is_leaf
    assert parameter.grad_fn is None


@pytest.mark.parametrize("outputs", [[], None])
def test_nothing_saved_is_copied_for_routines_that_leave_the_result(outputs: Any, acting: Act) -> None:
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(acting("insert_after_op", "relu_", lambda *values: None, outputs=outputs)):
        y = x.clone()
        for _ in range(2):
            y = y.relu_()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # type: ignore[union-attr]


class Doubled(torch.autograd.Function):
    """Doubles in place what it is given, and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return grad * doubled


class Handed(torch.autograd.Function):
    """Gives back what it is given, which it has not written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("trained", [False, True])
def test_what_a_function_marks_dirty_takes_the_value_of_a_routine(acting: Act, trained: bool) -> None:
    leaf = torch.ones(2, requires_grad=trained)
    with amanda.apply(acting("insert_after_op", "Doubled", times_ten)):
        for _ in range(3):
            leaf.grad = None
            x = leaf * 1
            result = Doubled.apply(x)
            assert result is x
            same(x.detach(), torch.full((2,), 20.0))
            if trained:
                result.sum().backward()
                assert leaf.grad is not None
                same(leaf.grad, torch.full((2,), 2.0))  # of what the function itself has saved


def test_what_a_function_hands_on_is_not_written(acting: Act) -> None:
    x = torch.ones(2, requires_grad=True) * 1
    with amanda.apply(acting("insert_after_op", "Handed", times_ten)):
        for _ in range(3):
            same(Handed.apply(x).detach(), torch.full((2,), 10.0))
    same(x.detach(), torch.ones(2))


class Outputs(amanda.Tool):
    """Looks at the outputs of each op; returns others for those of one op.

    seen: by op, what routines were given.  analysed: by op, the number of outputs that contexts have.
    """

    def __init__(self, only: str = "", change: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self.only, self.change = only, change
        self.outputs: dict[str, list[Any]] = {}
        self.analysed: dict[str, int] = {}
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.get_op_type()
        self.analysed[name] = len(context.get_outputs() or ())
        context.insert_after_op(self.look if name != self.only else self.changed, name=name)

    def look(self, *values: Any, name: str) -> None:
        self.outputs.setdefault(name, []).append(values)

    def changed(self, *values: Any, name: str) -> Any:
        self.look(*values, name=name)
        return [
            [self.change(each) for each in item] if isinstance(item, (list, tuple)) else self.change(item)
            for item in values
        ]


@torch.library.custom_op("amanda_writes::fill", mutates_args={"x"})
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)


@torch.library.custom_op("amanda_writes::swap", mutates_args={"x"})
def swap(x: Tensor, value: float) -> Tensor:
    before = x.clone()
    x.fill_(value)
    return before


def assign_column() -> Tensor:
    z = torch.zeros(2, 2)
    z[:, 0] = 3.0
    return z


def fill_custom() -> Tensor:
    z = torch.zeros(2, 2)
    fill(z, 3.0)
    return z


def add_to_list() -> Tensor:
    z = torch.zeros(2, 2)
    torch.ops.aten._foreach_add_.Scalar([z, z.clone()], 3.0)
    return z


def step_fused(optimizer: Any = torch.optim.Adam) -> Tensor:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer([weight], lr=0.1, fused=True).step()
    return weight.detach()


WRITERS = {
    "setitem": assign_column, "amanda_writes::fill": fill_custom, "_foreach_add_": add_to_list,
    "_fused_adam_": step_fused, "_fused_sgd_": lambda: step_fused(torch.optim.SGD),
    "_fused_adagrad_": lambda: step_fused(torch.optim.Adagrad),
    "_fused_adamw_": lambda: step_fused(torch.optim.AdamW),
}  # fmt: skip


@pytest.mark.parametrize("op", WRITERS)
def test_what_an_op_writes_and_does_not_return_is_an_output(op: str) -> None:
    program, tool = WRITERS[op], Outputs()
    expected = program()
    with amanda.apply(tool):
        for _ in range(4):
            assert torch.equal(program(), expected)
    assert tool.analysed[op] >= 1
    assert len(tool.outputs[op]) == 4
    for values in tool.outputs[op]:
        first = values[0][0] if isinstance(values[0], list) else values[0]
        same(first.detach(), expected)


@pytest.mark.parametrize("op", WRITERS)
def test_what_an_op_writes_and_does_not_return_can_be_changed_after_it(op: str) -> None:
    with amanda.apply(Outputs(op, lambda x: x * 0 + 7)):
        for _ in range(4):
            same(WRITERS[op](), torch.full((2, 2), 7.0))


def test_what_an_op_writes_beside_its_result_comes_after_it() -> None:
    with amanda.apply(tool := Outputs("amanda_writes::swap", lambda x: x + 1)):
        for _ in range(4):
            z = torch.zeros(2)
            same(swap(z, 3.0), torch.ones(2))
            same(z, torch.full((2,), 4.0))
    assert [len(values) for values in tool.outputs["amanda_writes::swap"]] == [2] * 4


def test_gradients_pass_what_was_assigned_by_index() -> None:
    def program() -> Any:
        x = torch.ones(3, 3, requires_grad=True)
        z = x * 2
        z[:, 0] = x[:, 1] * 3
        z[z > 5] = 1.0
        (z**2).sum().backward()
        return x.grad

    expected = program()
    with amanda.apply(Outputs("setitem")):
        for _ in range(4):
            same(program(), expected)


def test_statistics_that_an_op_writes_and_saves_may_be_given_anew() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weight, bias = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def program() -> list[torch.Tensor]:
        mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        normal, *_ = torch.ops.aten._native_batch_norm_legit(x, weight, bias, mean, variance, True, 0.1, 1e-5)
        (gradient,) = torch.autograd.grad((normal * x).sum(), x)
        return [normal, gradient, mean, variance]

    bare = program()
    with amanda.apply(EqualCopies(lambda value: value.clone() if isinstance(value, torch.Tensor) else value)):
        results = program()
    assert all(map(torch.equal, bare, results))

"""What holds at an op's first execution holds at later ones, which native code runs."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaves import leaf
from torch import Tensor, nn

import amanda
from amanda.interceptor import Mark
from amanda.plan.plan import Plan

Act = Callable[..., amanda.Tool]
TIMES = 4


class Calling(nn.Module):
    """A place for the ops of a program."""

    def __init__(self, program: Callable[[], Any]) -> None:
        super().__init__()
        self.program = program

    def forward(self) -> Any:
        return self.program()


def gradient(program: Callable[[Tensor], Tensor]) -> Callable[[], list[float]]:
    def run() -> list[float]:
        x = leaf(1, 2)
        numbers: list[float] = torch.autograd.grad(program(x).sum(), x)[0].tolist()
        return numbers

    return run


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def tenfold(value: Tensor) -> Tensor:
    return value * 10


def repeated(tool: amanda.Tool, program: Callable[[], Any]) -> list[Any]:
    module = Calling(program)
    with amanda.apply(tool):
        return [module() for _ in range(TIMES)]


def assigned(x: Tensor) -> Tensor:
    y = torch.zeros(2)
    y[0:1] = x[1:]
    return y


def masked(x: Tensor) -> Tensor:
    y = torch.zeros(2)
    y[torch.tensor([True, True])] = x
    return y


@pytest.mark.parametrize(
    ("program", "node", "expected"),
    [(assigned, "CopySlices", [0.0, 2.0]), (masked, "IndexPutBackward0", [2.0, 2.0])],
)
def test_an_assignment_keeps_its_backward_ops(
    program: Any, node: str, expected: list[float], acting: Act
) -> None:
    tool = acting("insert_before_backward_op", node, doubled)
    assert repeated(tool, gradient(program)) == [expected] * TIMES


def test_an_op_in_place_may_be_given_its_tensor_by_keyword(acting: Act) -> None:
    tool = acting("insert_after_op", "clamp_", tenfold)
    assert repeated(tool, gradient(lambda x: torch.clamp_(input=x * 1, min=0))) == [[1.0, 1.0]] * TIMES


class Doubling(torch.autograd.Function):
    """A user's operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_an_op_in_place_that_does_nothing_follows_a_function(acting: Act) -> None:
    tool = acting("insert_after_op", "dropout_", tenfold)
    program = gradient(lambda x: torch.dropout_(Doubling.apply(x), 0.5, False))  # type: ignore[no-untyped-call]
    assert repeated(tool, program) == [[2.0, 2.0]] * TIMES


def multiplied(x: Tensor) -> Tensor:
    y = x * 1
    return y.mul_(y)


def test_an_op_in_place_on_itself_is_an_error_in_the_backward_pass_alone(acting: Act) -> None:
    tool = acting("insert_after_op", "mul_", tenfold)
    results = repeated(tool, lambda: multiplied(leaf(2, 3)))
    assert [y.tolist() for y in results] == [[40.0, 90.0]] * TIMES
    for y in (multiplied(leaf(2, 3)), *results):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_view_of_a_leaf_is_written_where_nothing_is_recorded(acting: Act) -> None:
    def program() -> list[float]:
        weight = leaf(1, 2)
        with torch.no_grad():
            weight[:1].mul_(3)
        values: list[float] = weight.tolist()
        return values

    assert repeated(acting("insert_after_op", "mul_", tenfold), program) == [[30.0, 2.0]] * TIMES


def test_a_tensor_may_have_an_attribute_of_any_name(acting: Act) -> None:
    def program() -> Any:
        x = leaf(1, 2)
        y = (x * 2).sum()
        y.node = "mine"  # type: ignore[attr-defined]
        y.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad.tolist()

    tool = acting("insert_before_backward_op", "MulBackward0", doubled)
    assert repeated(tool, program) == [[4.0, 4.0]] * TIMES


def test_a_routine_runs_once_in_each_of_two_passes_one_within_the_other(acting: Act) -> None:
    def program() -> Any:
        x = leaf(1, 2)
        y = x * 3
        z = y * y
        inner: list[Any] = []

        def pass_back(_: Tensor) -> None:
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    total = z.sum()
                inner[0] = torch.autograd.grad(total, x, retain_graph=True)[0].tolist()

        z.register_hook(pass_back)
        z.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad.tolist(), inner[0]

    tool = acting("insert_before_backward_op", "MulBackward0", doubled)
    assert repeated(tool, program) == [([72.0, 144.0], [72.0, 144.0])] * TIMES


def test_leaves_that_are_made_anew_have_their_routines_and_leave_nothing(acting: Act) -> None:
    weight = leaf(1, 2)

    def program() -> Any:
        x = leaf(1, 2)
        (x * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad.tolist()

    def settled() -> int:
        gc.collect()
        return sum(len(item.backward.native_hooks) for item in gc.get_objects() if type(item) is Plan)

    module = Calling(program)
    with amanda.apply(acting("insert_before_backward_op", "AccumulateGrad", doubled)):
        assert [module() for _ in range(TIMES)] == [[2.0, 4.0]] * TIMES
        before = settled()
        for _ in range(20):
            module()
        assert settled() == before


def test_graphs_that_no_pass_reaches_are_freed_where_an_input_is_written_later(acting: Act) -> None:
    def program() -> None:
        total, values = torch.zeros(10), torch.ones(10, requires_grad=True)
        total.add_(values + total)

    def marks() -> int:
        gc.collect()
        return Mark.alive()

    module = Calling(program)
    with amanda.apply(acting("insert_before_backward_op", "AddBackward0", lambda *_: None)):
        for _ in range(TIMES):
            module()
        before = marks()
        for _ in range(20):
            module()
        assert marks() == before


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_views_made_without_gradients_are_written_as_without_a_scope(after: bool, backward: bool) -> None:
    def program() -> list[torch.Tensor]:
        weight = nn.Parameter(torch.ones(4, 3))
        with torch.no_grad():
            row = weight[1]
            row.fill_(0).add_(1)
            doubled, flat = row * 2, row.view(3)
            flat.mul_(2).relu_()
            weight[2:].zero_()
        (weight * 2).sum().backward()
        assert weight.grad is not None
        return [weight.detach(), weight.grad, doubled, torch.cat([row.detach(), flat.detach()])]

    class Keeping(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)
            if backward:
                self.add_inst_for_op(lambda context: None, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            insert = context.insert_after_op if after else context.insert_before_op
            insert(self.look)

        def look(self, *values: Any, run: dict[str, Any]) -> None:
            run["values"] = values

    bare = program()
    with amanda.apply(Keeping()):
        for _ in range(3):
            assert all(map(torch.equal, program(), bare))

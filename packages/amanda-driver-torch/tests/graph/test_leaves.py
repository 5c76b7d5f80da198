"""AccumulateGrad of compiled graphs: the report tells where routines see another gradient than eagerly."""

import pytest
import torch
from torch import nn

import amanda


class Grads(amanda.Tool):
    """Keeps the gradients of leaves; an observer, of no value where `counts`."""

    def __init__(self, counts: bool = False) -> None:
        self.gradients: list[torch.Tensor] = []
        self.calls = 0
        self.counts = counts
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            if self.counts:
                context.insert_before_backward_op(self.count, grad_outputs=[])
            else:
                context.insert_before_backward_op(self.keep)

    @amanda.observer
    def keep(self, grad: torch.Tensor) -> None:
        self.gradients.append(grad.clone())
        self.calls += 1

    @amanda.observer
    def count(self) -> None:
        self.calls += 1


class Scaled(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@pytest.fixture(params=["aot_eager", "eager"])
def compiled(request: pytest.FixtureRequest) -> nn.Module:
    """A compiled module with one parameter."""
    torch._dynamo.reset()
    return torch.compile(Scaled(), backend=request.param)


X = torch.tensor([1.0, 4.0])


@pytest.mark.parametrize("counts", [False, True])
def test_one_gradient_for_a_leaf_is_that_of_eager_mode_and_is_not_reported(
    compiled: nn.Module, counts: bool
) -> None:
    tool = Grads(counts)
    with amanda.apply(tool, compiled="instrument") as scope:
        compiled(X).backward()
    assert tool.calls == 1
    assert scope.report == []


@pytest.mark.parametrize("counts", [False, True])
def test_gradients_of_two_graphs_come_one_by_one_and_are_reported(compiled: nn.Module, counts: bool) -> None:
    tool = Grads(counts)
    with amanda.apply(tool, compiled="instrument") as scope:
        (compiled(X) + compiled(X + 1)).backward()
    assert tool.calls == 2
    (entry,) = scope.report
    assert (entry.what, "not for their sum" in entry.reason) == ("AccumulateGrad of weight", True)


def test_a_gradient_that_is_not_stored_is_reported(compiled: nn.Module) -> None:
    tool = Grads()
    with amanda.apply(tool, compiled="instrument") as scope:
        torch.autograd.grad(compiled(X), compiled.weight)
    assert [gradient.tolist() for gradient in tool.gradients] == [[1.0, 4.0]]
    (entry,) = scope.report
    assert (entry.what, "stores no gradient" in entry.reason) == ("AccumulateGrad of weight", True)


def test_a_gradient_before_a_hook_on_the_parameter_is_reported(compiled: nn.Module) -> None:
    compiled.weight.register_hook(lambda grad: grad * 10)
    tool = Grads()
    with amanda.apply(tool, compiled="instrument") as scope:
        compiled(X).backward()
    assert [gradient.tolist() for gradient in tool.gradients] == [[1.0, 4.0]]
    assert compiled.weight.grad is not None
    assert compiled.weight.grad.tolist() == [10.0, 40.0]
    (entry,) = scope.report
    assert (entry.what, "before hooks" in entry.reason) == ("AccumulateGrad of weight", True)


def test_of_a_tool_that_is_not_open_in_the_backward_pass_nothing_is_reported(compiled: nn.Module) -> None:
    tool = Grads()
    with amanda.apply(tool, compiled="instrument"):
        y = compiled(X) + compiled(X + 1)
    with amanda.apply(amanda.Tool(), compiled="instrument") as scope:
        y.backward()
    assert tool.calls == 0
    assert scope.report == []


def test_tools_without_routines_there_are_told_nothing(compiled: nn.Module) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *_: None))
    with amanda.apply(tool, compiled="instrument") as scope:
        (compiled(X) + compiled(X + 1)).backward()
    assert scope.report == []

"""Compiled autograd, by which dynamo captures backward passes: in scopes they are autograd's own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amanda

# Dynamo asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _compiled_autograd(_compiler: None) -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


class Changing(amanda.Tool):
    """Changes what linear ops give, the gradients that enter their backward ops, and those of parameters."""

    def __init__(self, mark: Callable[[Any], Any]) -> None:
        self.routines = {
            "linear": mark(lambda output: output * 2),
            "AddmmBackward0": mark(lambda gradient: gradient * 3),
            "AccumulateGrad": mark(lambda gradient: gradient + 1),
        }
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_after_op(self.routines["linear"])

    def backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        if name in self.routines:
            context.insert_before_backward_op(self.routines[name])


def step(model: nn.Module, call: Callable[..., Any], backward: Callable[..., Any]) -> list[torch.Tensor]:
    model.zero_grad()
    output = call(X)
    backward(output)
    return [
        output.detach(),
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.traceable])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_gradients_are_those_of_eager_mode(mark: Callable[[Any], Any], is_compiled: bool) -> None:
    def plainly(output: torch.Tensor) -> None:
        output.sum().backward()

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    bare = step(model, model, plainly)
    with amanda.apply(Changing(mark)):
        expected = step(model, model, plainly)
    call = torch.compile(model, backend="aot_eager") if is_compiled else model
    backward = torch.compile(plainly, backend="aot_eager")
    with amanda.apply(Changing(mark), compiled="instrument") as scope:
        steps = [step(model, call, backward) for _ in range(2)]
    assert not counters["compiled_autograd"]["captures"]
    for tensors in steps:
        assert all(map(torch.equal, tensors, expected))
    assert not scope.report
    assert all(map(torch.equal, step(model, call, backward), bare))
    assert counters["compiled_autograd"]["captures"]

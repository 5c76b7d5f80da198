"""After the last scope torch is what it was, whatever ended it."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import amanda
from amanda import interceptor
from amanda.drivers.torch import TorchDriver
from amanda.drivers.torch._requirements import CHECKPOINT_GENERATOR
from amanda.scope.attachment import attachment


def state() -> list[Any]:
    """Every pointer and attribute that the driver changes."""
    driver: Any = attachment.driver(TorchDriver)
    addresses = [site.address for site in driver._targets_by_site] if interceptor.NATIVE else []
    return [
        *addresses,
        vars(torch.nn.Module)["__call__"],
        vars(torch._ops.OpOverload)["__call__"],
        vars(torch._ops.OpOverloadPacket)["__call__"],
        vars(torch._C.ScriptFunction)["__call__"],
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR),
        vars(torch.utils.checkpoint.CheckpointFunction)["forward"],
        torch.relu,
        torch.is_grad_enabled(),
        interceptor.active(),
    ]


class Raising(amanda.Tool):
    """Raises at its n-th call, of analysis or routine, forward or backward."""

    def __init__(self, nth: int, error: type[BaseException]) -> None:
        self.remaining, self.error = nth, error
        for backward in (False, True):
            for after in (False, True):
                self.add_inst_for_op(self.analyse, backward=backward, require_outputs=after)

    def analyse(self, context: amanda.OpContext) -> None:
        self.count()
        if context.is_forward() and not context.is_after():
            context.insert_before_op(self.routine)
            context.insert_after_op(self.routine)
        elif context.is_backward() and not context.is_after():
            context.insert_before_backward_op(self.routine)
            context.insert_after_backward_op(self.routine)

    def routine(self, *values: Any) -> None:
        self.count()

    def count(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise self.error("on purpose")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 13, 21, 34])
def test_an_exception_at_any_point_leaves_torch_as_it_was(nth: int, error: type[BaseException]) -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.ones(2, 3)
    with amanda.apply(amanda.Tool()):
        net(x)  # the driver has been made
    before = state()
    expected = torch.relu(net(x))

    @amanda.apply(Raising(nth, error))
    def train() -> None:
        for _ in range(3):
            net(x).sum().backward()

    with pytest.raises(error, match="on purpose") as raised:
        train()
    assert any("tool Raising" in note for note in raised.value.__notes__)
    assert state() == before
    assert torch.equal(torch.relu(net(x)), expected)
    net(x).sum().backward()


def test_an_exception_of_the_program_reaches_it_as_itself() -> None:
    before = state()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), amanda.apply(amanda.Tool()):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert state()[-4:] == before[-4:]

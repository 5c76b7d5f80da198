"""FLOPs on the device meta, on fake tensors, under modes: one op is one op wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda.tools.flops import FlopsTool

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 16), (6, 8)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.GELU(), nn.ConvTranspose2d(8, 4, 3)
        ),
        (2, 4, 8, 8),
    ),
    "lstm": (lambda: nn.LSTM(8, 4, 2), (5, 3, 8)),
    "gru": (lambda: nn.GRU(8, 4, bidirectional=True), (5, 3, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 4)), (3, 4, 8)),
}


def products(name: str, device: str, context: Any) -> dict[tuple[str, ...], int]:
    """Multiply-accumulates of a training step by phase and type, where there are any."""
    make, extents = MODULES[name]
    tool = FlopsTool()
    with context, torch.device(device):
        model, x = make(), torch.ones(extents, requires_grad=True)
        with amanda.apply(tool):
            made = model(x)
            (made[0] if isinstance(made, tuple) else made).sum().backward()
    return {tuple(row[:2]): row[3] for row in tool.result.by("phase", "type").rows() if row[3]}


@pytest.mark.parametrize("name", MODULES)
def test_an_op_is_one_op_on_every_device(name: str) -> None:
    real = products(name, "cpu", nullcontext())
    assert products(name, "cpu", FakeTensorMode()) == real
    meta = products(name, "meta", nullcontext())
    forward = ("forward", next(iter(dict.fromkeys(kind for phase, kind in real if phase == "forward")), ""))
    assert meta.get(forward) == real.get(forward)
    if name != "encoder":  # whose attention is of other kernels in the backward pass
        phases = ("forward", "backward")
        totals = [
            [sum(n for key, n in one.items() if key[0] == phase) for phase in phases] for one in (meta, real)
        ]
        assert totals[0] == totals[1]


def calls(program: Callable[[], Any]) -> list[tuple[str, str]]:
    """The ops of a program, forward and backward, in order."""
    seen: list[tuple[str, str]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(("forward", context.get_op_type())))
    tool.add_inst_for_op(
        lambda context: seen.append(("backward", context.get_backward_op().__name__)), backward=True
    )
    with amanda.apply(tool):
        program()
    return seen


def step(device: str = "cpu") -> None:
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    nn.functional.gelu(
        torch.addmm(torch.ones(4, device=device), torch.ones(2, 3, device=device), weight)
    ).var().backward()


def test_the_kernels_of_the_device_are_no_ops() -> None:
    assert calls(lambda: step("meta")) == calls(step)


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [PassOn, lambda: FlopCounterMode(display=False)])
def test_what_a_mode_passes_on_is_no_op_of_its_own(mode: Callable[[], Any]) -> None:
    def under_mode() -> None:
        with mode():
            step()

    assert calls(under_mode) == calls(step)


def test_functions_of_torch_that_a_program_calls_are_ops() -> None:
    import torch._refs

    assert len(calls(lambda: torch._refs.mul(torch.ones(2), torch.ones(2)))) > 2


def test_what_a_library_registers_for_fake_tensors_is_no_op() -> None:
    @torch.library.custom_op("flops_tests::square", mutates_args=())
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    @product.register_fake
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    x = torch.ones(2, 2, device="meta")
    assert [name for _, name in calls(lambda: product(x, x))] == ["flops_tests::square"]

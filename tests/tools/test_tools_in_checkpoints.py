"""Tools where torch.utils.checkpoint runs a part of the model again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.tools.dump import DumpTool
from amanda.tools.dynamic_prune import ActivationPruneTool
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.patch import PatchTool
from amanda.tools.profile import ProfileTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.select import select
from amanda.tools.stats import StatsTool
from amanda.tools.steps import Steps

Step = Callable[[Tensor], None]


class Net(nn.Module):
    """saves: use_reentrant of a checkpoint; None for none."""

    def __init__(self, saves: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.saves = nn.Linear(8, 16), nn.Linear(16, 1), saves
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x))
        x = self.block(x) if self.saves is None else checkpoint(self.block, x, use_reentrant=self.saves)
        made: Tensor = self.last(x)
        return made


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(1 + i) * torch.randn(4, 8, generator=generator) for i in range(count)]


def trained(tool: amanda.Tool, saves: bool | None, at_once: int = 1, steps: int = 3) -> list[Tensor]:
    """Return the gradients of steps; at_once: batches with forward passes ahead of backward ones."""
    net = Net(saves)
    with amanda.apply(tool):
        for step in range(steps):
            losses = [net(x).square().sum() for x in batches(steps * at_once)[step::steps]]
            for loss in losses:
                loss.backward()
    return [one.grad for one in net.parameters() if one.grad is not None]


CHANGING: dict[str, Callable[[], amanda.Tool]] = {
    # Of random elements others are chosen in another model, so all elements have faults.
    "inject": lambda: InjectTool("value", value=3.0, module="block.1", start=0, end=1, probability=1.0),
    "inject, weights": lambda: InjectTool(
        "value", "weights", value=0.5, type="linear", start=1, frequency=2, probability=1.0
    ),
    "inject, inputs": lambda: InjectTool("zero", "inputs", type="tanh", start=1, probability=1.0),
    "patch, a step": lambda: PatchTool("block.1", scale=0.5, steps=0),
    "patch, a list": lambda: PatchTool("block.1", add=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    "patch, differentiable": lambda: PatchTool("block.2", scale=2.0, steps=[1], differentiable=True),
    "select": lambda: select(PatchTool("block.1", scale=0.5), end=1),
    "static": lambda: QuantizeTool(weight_bits=4, activation_bits=4, calibration=1),
    "dynamic": lambda: QuantizeTool("dynamic", weight_bits=4, activation_bits=4),
    "qat": lambda: QuantizeTool("qat", weight_bits=4, activation_bits=4, averaging=0.5),
    "lsq": lambda: QuantizeTool("lsq", weight_bits=4, activation_bits=4),
    "lsq+": lambda: QuantizeTool("lsq+", weight_bits=4, activation_bits=4, calibration=1),
}


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_gradients_under_a_tool_are_those_without_a_checkpoint(name: str, saves: bool, at_once: int) -> None:
    plain, tool = CHANGING[name](), CHANGING[name]()
    expected, found = trained(plain, None, at_once), trained(tool, saves, at_once)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, expected, found))
    state = plain.state_dict()
    assert state.keys() == tool.state_dict().keys()
    assert all(torch.equal(value, tool.state_dict()[key]) for key, value in state.items())


@pytest.mark.parametrize("saves", [False, True])
def test_faults_and_patches_are_counted_once(saves: bool) -> None:
    inject, patch = InjectTool("zero", type="tanh"), PatchTool("block.1", scale=0.5, steps=[0, 2])
    trained(inject, saves)
    trained(patch, saves)
    assert [one.execution for one in inject.result.injections] == [0, 0, 1, 1, 2, 2]
    (point,) = patch.result.patched
    assert (point.executions, point.changed) == (3, 2)


@pytest.mark.parametrize("saves", [False, True])
def test_values_are_observed_once(saves: bool, tmp_path: Path) -> None:
    def observed(saves: bool | None) -> tuple[Any, ...]:
        stats, dump, nan = StatsTool(), DumpTool(tmp_path / str(saves), every=2), NanTool()
        for tool in (stats, dump, nan):
            trained(tool, saves)
        in_block = [row for row in stats.result.rows() if "block" in str(row)]
        return sorted(map(str, in_block)), len(dump.result.rows()), nan.result.to_dict()

    assert observed(saves)[0] == observed(None)[0]


@pytest.mark.parametrize("saves", [False, True])
def test_recomputed_work_is_a_phase(saves: bool) -> None:
    plain, flops, profile = FlopsTool(), FlopsTool(), ProfileTool()
    trained(plain, None)
    trained(flops, saves)
    trained(profile, saves)
    for phase in ("forward", "backward"):
        assert flops.result.total("macs", phase) == plain.result.total("macs", phase)
    assert flops.result.total("macs", "recomputation") == 3 * 2 * 4 * 16 * 16
    products = [one for one in profile.result.ops if one.type == "linear" and "block" in one.module]
    assert {(one.phase, one.calls) for one in products} == {("forward", 3), ("recomputation", 3)}
    flops.clear()
    assert not flops.result.total("macs")


def test_a_step_begins_once() -> None:
    steps, numbers = Steps(), list[int]()
    steps.on_step(numbers.append)
    net, x = Net(False), torch.rand(4, 8)
    with amanda.apply(steps):
        for _ in range(3):
            checkpoint(net, x, use_reentrant=False).sum().backward()
    assert numbers == [0, 1, 2]


def test_a_calibration_that_has_ended_does_not_change_the_recomputation() -> None:
    def run(saves: bool | None) -> list[Tensor]:
        net, tool = Net(saves), QuantizeTool(weight_bits=3, activation_bits=3)
        with amanda.apply(tool):
            with tool.calibrating():
                loss = net(batches(1)[0]).sum()
            loss.backward()
        return [one.grad for one in net.parameters() if one.grad is not None]

    for saves in (False, True):
        assert all(map(torch.equal, run(None), run(saves)))


def test_noise_of_a_predictor_is_drawn_once() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = x + self.last(torch.relu(self.first(x)))
            return made

    def run(saves: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        block, tool, x = Residual(), ActivationPruneTool(), torch.rand(2, 4, 8, 8)
        tool.prepare(block, x)
        tool.train()
        tool.clear()
        with amanda.apply(tool):
            for _ in range(3):
                made = checkpoint(block, x, use_reentrant=False) if saves else block(x)
                (made.square().sum() + tool.loss()).backward()
        return [one.grad for one in (*block.parameters(), *tool.parameters())], tool.result.to_dict()

    (expected, shares), (found, others) = run(False), run(True)
    assert shares == others
    assert all(map(torch.equal, expected, found))

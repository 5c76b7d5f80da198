"""Weights that torchao has packed: a tool leaves what it cannot read, says which, and breaks nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.dump import DumpTool
from amanda.tools.dynamic_prune import DynamicChannelPruneTool
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

X = torch.linspace(-1, 1, 64).reshape(2, 32)


@pytest.fixture
def model(example: Any) -> nn.Module:
    example("models").let_torchvision_load()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    quantize_(network, Int8WeightOnlyConfig())
    return network


TOOLS: dict[str, Callable[[Path], amanda.Tool]] = {
    "coverage": lambda _: CoverageTool(),
    "dump": lambda folder: DumpTool(folder, outputs="full", inputs="summary"),
    "dynamic_prune": lambda _: DynamicChannelPruneTool(),
    "flops": lambda _: FlopsTool(),
    "nan": lambda _: NanTool(),
    "profile": lambda _: ProfileTool(),
    "prune": lambda _: PruneTool(),
    "quantize": lambda _: QuantizeTool(activation_bits=None, calibration=1),
    "quantize in training": lambda _: QuantizeTool("qat", activation_bits=None),
    "stats": lambda _: StatsTool(),
    "trace": lambda _: TraceTool(),
}
TELLING = {"dump", "nan", "prune", "quantize", "quantize in training", "stats"}


@pytest.mark.parametrize("name", TOOLS)
def test_a_program_computes_what_it_does_alone(model: nn.Module, name: str, tmp_path: Path) -> None:
    expected = model(X)
    tool: Any = TOOLS[name](tmp_path)
    with amanda.apply(tool):
        for _ in range(2):
            assert torch.equal(model(X), expected)
    if name in TELLING:
        told = [line for line in str(tool.result).splitlines() if "Int8Tensor" in line]
        assert len(told) == 2
        assert "linear of 0" in told[0]


@pytest.mark.parametrize("kind", [NanTool, StatsTool])
def test_what_is_left_is_said_again_after_clear(model: nn.Module, kind: Callable[[], Any]) -> None:
    tool = kind()
    with amanda.apply(tool):
        model(X)
        tool.clear()
        model(X)
    assert str(tool.result).count("Int8Tensor") == 2


def test_each_product_is_counted_once(model: nn.Module) -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        model(X)
    assert tool.result.total("macs", "forward") == 2 * (32 * 16 + 16 * 8)

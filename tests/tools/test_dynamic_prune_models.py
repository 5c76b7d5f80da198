"""Models that the tools of dynamic pruning are applied to as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.dynamic_prune import DynamicChannelPruneTool

DENSITY = 0.5
VISION = {"vgg19": 16, "vgg11_bn": 8, "resnet34": 36, "squeezenet1_1": 26}


@pytest.mark.parametrize("name", VISION)
def test_a_model_of_torchvision_runs_unmodified(name: str, example: Any) -> None:
    vision = example("models").vision
    with torch.device("meta" if name.startswith("vgg") else "cpu"):
        model = vision(name)
    if name.startswith("vgg"):
        model = model.features.to_empty(device="cpu")  # the rest has no convolutions, but 120 million weights
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.01)
    zeros: list[float] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(
                lambda _, __, y: zeros.append((y.abs().amax((2, 3)) == 0).float().mean().item())
            )
    tool, x = DynamicChannelPruneTool(DENSITY), torch.randn(2, 3, 64, 64)
    with torch.no_grad(), amanda.apply(tool) as scope:
        assert model(x).isfinite().all()
    assert scope.report == []
    rows = tool.result.rows()
    assert len(rows) == VISION[name]
    assert all(row[6] >= DENSITY for row in rows)
    assert tool.result.saved >= DENSITY
    inner = zeros if name != "resnet34" else zeros[1::2]  # behind an addition fewer channels are zero
    assert min(inner) >= DENSITY

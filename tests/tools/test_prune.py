"""Pruning of whole models: ResNet-50 against torch.nn.utils.prune."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from amanda.tools.prune import PruneTool


def test_a_global_budget_has_the_masks_of_global_unstructured_on_resnet50(resnet50: Any) -> None:
    torch.manual_seed(0)
    model = resnet50().eval()
    tool = PruneTool(sparsity=0.5, scope="global")
    with torch.no_grad():
        tool.prepare(model, torch.rand(1, 3, 32, 32))
    result = tool.result
    masks = [value for name, value in tool.state_dict().items() if name.endswith("/mask")]
    assert (len(result.rows()), result.elements, f"{result.sparsity:.4f}") == (54, 25_502_912, "0.5000")
    layers = [one for one in model.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured([(one, "weight") for one in layers], prune.L1Unstructured, amount=0.5)
    assert len(masks) == len(layers)
    for mask, layer in zip(masks, layers, strict=True):
        assert torch.equal(mask, layer.weight_mask.bool())

"""Pruning of whole models: ResNet-50 against torch.nn.utils.prune, BERT trained beside other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool


def masks(tool: PruneTool) -> list[torch.Tensor]:
    return [value for name, value in tool.state_dict().items() if name.endswith("/mask")]


@pytest.mark.long
def test_a_global_budget_has_the_masks_of_global_unstructured_on_resnet50(resnet50: Any) -> None:
    torch.manual_seed(0)
    model = resnet50().eval()
    tool = PruneTool(sparsity=0.5, scope="global")
    with torch.no_grad():
        tool.prepare(model, torch.rand(1, 3, 32, 32))
    result = tool.result
    assert (len(result.rows()), result.elements, f"{result.sparsity:.4f}") == (54, 25_502_912, "0.5000")
    layers = [one for one in model.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured([(one, "weight") for one in layers], prune.L1Unstructured, amount=0.5)
    assert len(masks(tool)) == len(layers)
    for mask, layer in zip(masks(tool), layers, strict=True):
        assert torch.equal(mask, layer.weight_mask.bool())


class Training:
    """A BERT that is trained from the same weights each time."""

    def __init__(self, bert: Any) -> None:
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 50}
        self.model = bert(num_hidden_layers=1, **sizes)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.tokens = torch.arange(24).reshape(2, 12)

    def __call__(self, *tools: amanda.Tool, steps: int = 3, resume: bool = False) -> list[float]:
        torch.manual_seed(3)
        if not resume:
            self.model.load_state_dict(self.start)
        optimizer, losses = torch.optim.SGD(self.model.parameters(), lr=0.1), []
        with amanda.apply(*tools) as scope:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = self.model(self.tokens)[1].square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert scope.report == []
        return losses


@pytest.fixture
def train(bert: Any) -> Training:
    return Training(bert)


def test_pruned_and_quantised_training_has_zeros_where_flops_and_stats_look(train: Training) -> None:
    vanilla = train()
    alone = PruneTool(pattern="2:4")
    wanted = train(alone)
    pruned, flops, stats = PruneTool(pattern="2:4"), FlopsTool(), StatsTool(gradients=False)
    assert train(pruned, flops, stats) == wanted != vanilla
    assert pruned.result.rows() == alone.result.rows()
    assert len(pruned.result.rows()) == 7
    bare = FlopsTool()
    train(bare)
    assert flops.result.total("macs") == bare.result.total("macs")
    read = stats.result.to_dict()["rows"]
    linear = [row for row in read if row["type"] == "linear" and row["tensor"] == "weight"]
    assert len(linear) == 7
    assert {round(row["sparsity"], 6) for row in linear} == {0.5}
    both = PruneTool(pattern="2:4"), QuantizeTool("qat", 4, 8)
    assert train(*both) != wanted
    assert all(torch.equal(one, other) for one, other in zip(masks(both[0]), masks(alone), strict=True))
    assert both[1].result.rows() != []


def test_pruning_goes_on_after_a_restart(train: Training, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "schedule": "cubic",
        "end": 6,
        "frequency": 2,
        "sparsity": 0.8,
        "scope": "global",
    }
    first = PruneTool(**options)
    first.prepare(train.model, train.tokens)
    train(first)
    torch.save([train.model.state_dict(), first.state_dict()], tmp_path / "state.pt")
    wanted = train(first, steps=5, resume=True)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    train.model.load_state_dict(weights)
    second = PruneTool(**options)
    second.load_state_dict(state)
    assert train(second, steps=5, resume=True) == wanted
    assert all(torch.equal(one, other) for one, other in zip(masks(second), masks(first), strict=True))
    assert f"{second.result.sparsity:.3f}" == "0.800"
    second.finalize(train.model)
    zeros = sum(int((one.weight == 0).sum()) for one in train.model.modules() if isinstance(one, nn.Linear))
    assert zeros == second.result.zeros

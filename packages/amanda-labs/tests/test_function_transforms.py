"""Tools leave what function transforms of torch.func compute as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.partition import PartitionTool
from amanda.tools.remat import RematTool
from amanda.tools.search import SearchTool
from amanda.tools.sentinel import SentinelTool

TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "remat": RematTool, "remat within a budget": lambda: RematTool(budget=2000), "sentinel": SentinelTool,
    "effective_path": EffectivePathTool, "partition": lambda: PartitionTool(stages=2),
    "search": lambda: SearchTool(["relu=keep|gelu"]),
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )
    return nn.Sequential(*layers)


def outputs(model: nn.Module) -> list[Tensor]:
    """Return gradients per sample, a directional derivative, outputs under vmap, and ordinary gradients."""
    parameters = dict(model.named_parameters())
    x = torch.linspace(-1, 1, 5 * 48).reshape(5, 3, 4, 4)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (x[None],)).square().sum()
        return result

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    derivative = torch.func.jvp(lambda x: model(x).sum(), (x,), (torch.ones_like(x),))
    batched = torch.func.vmap(lambda x: model(x[None])[0])(x)
    model(x).sum().backward()
    return [*per_sample.values(), *derivative, batched, *(weight.grad for weight in model.parameters())]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch.jit, with which torch decomposes tangents
@pytest.mark.parametrize("name", TOOLS)
def test_a_program_with_transforms_computes_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = outputs(network())
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(TOOLS[name]()):
        results = outputs(network())
    assert all(map(torch.equal, results, expected))
    is_left = name.startswith("remat") or name == "effective_path"
    assert bool(caplog.records) == is_left

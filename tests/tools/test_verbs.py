"""One set of verbs: prepare, calibrating, finalize, convert, clear, in every tool that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.plugins import tool_class
from amanda.tools.prune import ChannelPruneTool, PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.quantize.weights import AWQTool, GPTQTool, SmoothQuantTool
from amanda.tools.search import SearchTool

FORMER = ("preparing", "collecting", "plan_fold", "look", "fold", "release", "renew", "restart")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "make",
    [
        QuantizeTool, lambda: GPTQTool(4, 16), lambda: AWQTool(4, 16), SmoothQuantTool,
        lambda: PruneTool(importance="wanda"), lambda: PruneTool(scope="global"),
    ],
    ids=["quantize", "gptq", "awq", "smoothquant", "wanda", "global"],
)  # fmt: skip
@torch.no_grad()
def test_calibrating_is_the_same_inside_of_a_scope_and_around_it(make: Callable[[], Any]) -> None:
    model, inside, around = network(), make(), make()
    with amanda.apply(inside), inside.calibrating():
        model(X)
    with around.calibrating(), amanda.apply(around):
        model(X)
    with amanda.apply(inside):
        wanted = model(X)
    with amanda.apply(around):
        assert torch.equal(model(X), wanted)
    assert not torch.equal(model(X), wanted)


def test_search_measures_costs_while_it_calibrates() -> None:
    model, prepared, calibrated = network(), SearchTool("linear=keep|skip"), SearchTool("linear=keep|skip")
    prepared.prepare(model, X)
    with amanda.apply(calibrated), calibrated.calibrating():
        model(X)
    assert prepared.flops() == calibrated.flops() > 0


@pytest.mark.parametrize("make", [PruneTool, lambda: ChannelPruneTool(module="0")])
def test_cleared_tools_are_as_new_ones(make: Callable[[], Any]) -> None:
    model, tool = network(), make()
    wanted = model(X)
    assert not torch.equal(tool.prepare(model, X), wanted)
    tool.clear()
    assert list(tool.result.rows()) == []
    again = tool.prepare(model, X)
    assert torch.equal(again, make().prepare(model, X))


@pytest.mark.parametrize("name", sorted(plugin.name for plugin in amanda.list_tools()))
def test_a_former_verb_is_there_only_to_warn(name: str) -> None:
    kind: Any = tool_class(name)
    assert callable(kind.prepare)
    assert callable(kind.calibrating)
    assert callable(kind.clear)
    former = [getattr(kind, verb) for verb in FORMER if hasattr(kind, verb)]
    assert [one.__name__ for one in former if "Deprecated: use" not in (one.__doc__ or "")] == []

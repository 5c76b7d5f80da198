"""search: finalize() returns the net that was evaluated, with trained candidates."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.search import Choice, SearchError, SearchTool

MODES = ("zeros", "reflect", "replicate", "circular")


def trained(tool: SearchTool) -> None:
    """Give the candidates other weights than those that they start with."""
    for weight in tool.weights():
        nn.init.normal_(weight)


def evaluated(tool: SearchTool, model: nn.Module, x: Tensor) -> Tensor:
    with amanda.apply(tool), torch.no_grad():
        output: Tensor = model(x)
    return output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"padding": 2, "dilation": 2}, {"padding": (1, 2)}, {"padding": "same"}, {"padding": 0}],
    ids=str,
)
def test_each_candidate_is_what_was_evaluated(mode: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding_mode=mode, **options))
    labels = ["conv1", "conv5", "conv7", "conv3g2", "conv5g2", "width0.5", "bits4", "skip"]
    x, tool = torch.rand(2, 4, 10, 10), SearchTool([Choice(["keep", *labels])])
    tool.prepare(model, x)
    trained(tool)
    for label in labels:
        if label in tool.space["0/conv2d"]:
            tool.architecture = {"0/conv2d": label}
            assert torch.equal(tool.finalize(model)(x), evaluated(tool, model, x)), label
        else:
            assert any(f"no {label} at 0/conv2d" in text for text in tool.result.remarks)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES[1:])
def test_padding_of_another_window_is_that_of_the_finalized_module(mode: str, rank: int) -> None:
    kind: Callable[..., nn.Module] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model, x = nn.Sequential(kind(2, 4, 3, padding=1, padding_mode=mode)), torch.rand(1, 2, *[6] * rank)
    tool = SearchTool([Choice(["keep", "conv1", "conv5"])])
    tool.prepare(model, x)
    ((name, labels),) = tool.space.items()
    assert labels == ("keep", "conv1", "conv5")
    for label in labels:
        trained(tool)
        tool.architecture = {name: label}
        finalized = tool.finalize(model)
        assert torch.equal(finalized(x), evaluated(tool, model, x))
        assert finalized[0].padding_mode == mode


def test_window_whose_reflections_the_input_lacks_is_refused() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")), torch.rand(1, 2, 3, 3)
    tool = SearchTool([Choice(["keep", "conv5", "conv7"])])
    tool.prepare(model, x)
    assert tool.space == {"0/conv2d": ("keep", "conv5")}
    assert any("smaller than its reflect padding" in text for text in tool.result.remarks)


def test_sixty_nets_are_what_was_evaluated() -> None:
    torch.manual_seed(0)
    choices = [
        Choice(["keep", "conv1", "conv5", "conv3g2", "width0.5", "bits4", "skip"], type="conv2d"),
        Choice(["keep", "gelu", "tanh", "silu", "skip"], type=["relu", "sigmoid"]),
        Choice(["keep", "bits3", "width0.5", "skip"], type="linear"),
    ]
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode), nn.ReLU(inplace=mode != "zeros"))
        for mode in MODES
    ]
    model = nn.Sequential(*blocks, nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 64, 4), nn.Linear(4, 4)).eval()
    x, draw = torch.rand(2, 4, 8, 8), random.Random(0)
    tool = SearchTool(choices)
    tool.prepare(model, x)
    trained(tool)
    assert len(tool.space) == 11
    for _ in range(60):
        tool.architecture = {name: draw.choice(labels) for name, labels in tool.space.items()}
        assert torch.equal(tool.finalize(model)(x), evaluated(tool, model, x)), tool.architecture


class Residual(nn.Module):
    """A convolution between ops in place, whose input is added to its output."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.relu, self.functional = nn.ReLU(inplace=True), functional

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.second(x)
        y = torch.relu_(y) if self.functional else self.relu(y)
        return x + y


def test_skip_before_an_op_in_place_is_trained_on_a_copy() -> None:
    model, x = Residual(functional=False), torch.rand(1, 2, 6, 6) - 0.5
    tool = SearchTool([Choice(["keep", "skip"], module="second")])
    tool.prepare(model, x)
    tool.architecture = {"second/conv2d": "skip"}
    y = model.first(x).tanh()
    expected = y + y.relu()
    (gradient,) = torch.autograd.grad(expected.sum(), model.first.weight)
    for run in (model, tool.finalize(model)):
        model.zero_grad()
        with amanda.apply(*([tool] if run is model else [])):
            output = run(x)
            output.sum().backward()
        assert torch.equal(output, expected)
        assert torch.equal(run.first.weight.grad, gradient)
    assert model.relu.inplace


def test_skip_before_a_function_in_place_is_no_module() -> None:
    model, x = Residual(functional=True), torch.rand(1, 2, 6, 6)
    tool = SearchTool([Choice(["keep", "skip"], module="second")])
    tool.prepare(model, x)
    tool.architecture = {"second/conv2d": "skip"}
    with pytest.raises(
        SearchError, match=r"relu at .*test_search_finalize.py:\d+ writes to its input in place"
    ):
        tool.finalize(model)

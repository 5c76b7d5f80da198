"""remat: gradients are those of the bare run to the bit, and the budget is held."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import ToolError
from amanda.tools.flops import FlopsTool
from amanda.tools.remat import HEURISTICS, BudgetError, RematTool

Run = Callable[[], Tensor]


class Chain(nn.Module):
    """n times a linear layer and tanh."""

    def __init__(self, n: int = 12, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(scope="module")
def chain() -> tuple[nn.Module, Run]:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(64, 32)
    return model, lambda: model(x).square().sum()


def step(model: nn.Module, run: Run, tool: amanda.Tool | None = None, *more: amanda.Tool) -> list[Tensor]:
    """Loss, gradients and buffers of one step, from the same state of the random generator."""
    torch.manual_seed(1)
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.zero_grad()
    if tool is None:
        loss = run()
        loss.backward()
    else:
        with amanda.apply(tool, *more):
            loss = run()
            loss.backward()
    tensors = [
        loss.detach(),
        *(tensor.grad.clone() for tensor in model.parameters() if tensor.grad is not None),
    ]
    tensors += [tensor.clone() for tensor in model.buffers()]
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            tensor.copy_(buffers[name])
    return tensors


def equal(tensors: list[Tensor], other_tensors: list[Tensor]) -> bool:
    return len(tensors) == len(other_tensors) and all(map(torch.equal, tensors, other_tensors))


@pytest.fixture(scope="module")
def peak(chain: tuple[nn.Module, Run]) -> int:
    """Bytes that the chain needs without a budget."""
    tool = RematTool()
    assert equal(step(*chain), step(*chain, tool))
    assert tool.result.evictions == tool.result.rematerialisations == 0
    return tool.result.peak


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_every_heuristic_holds_the_budget_with_the_gradients_of_the_bare_run(
    chain: tuple[nn.Module, Run], peak: int, heuristic: str
) -> None:
    for share in (0.5, 0.25):
        tool = RematTool(budget=int(share * peak), heuristic=heuristic, strict=True)
        assert equal(step(*chain, tool), step(*chain))
        assert 0 < tool.result.peak <= share * peak
        assert tool.result.short == 0
        assert tool.result.evictions > 0
        assert tool.result.rematerialisations > 0


def test_a_budget_that_fits_evicts_nothing(chain: tuple[nn.Module, Run], peak: int) -> None:
    tool = RematTool(budget=peak)
    assert equal(step(*chain, tool), step(*chain))
    assert tool.result.peak == peak
    assert tool.result.rows() == []


def test_a_result_stays_as_it_is_after_clear(chain: tuple[nn.Module, Run], peak: int) -> None:
    tool = RematTool(budget=peak // 2)
    step(*chain, tool)
    result = tool.result
    rows, evictions = result.rows(), result.evictions
    tool.clear()
    assert evictions > 0
    assert (result.rows(), result.evictions) == (rows, evictions)


def test_a_budget_that_cannot_be_held_is_said_or_an_error(
    chain: tuple[nn.Module, Run], peak: int, caplog: pytest.LogCaptureFixture
) -> None:
    tool = RematTool(budget=peak // 20)
    with caplog.at_level(logging.WARNING, "amanda"):
        assert equal(step(*chain, tool), step(*chain))
        step(*chain, tool)
    assert tool.result.short == tool.result.peak - peak // 20 > 0
    assert [record.message[:32] for record in caplog.records] == ["the memory budget is exceeded by"]
    assert "was exceeded by up to" in str(tool.result)
    with pytest.raises(
        BudgetError, match=r"(linear|tanh) at .*test_remat.py:\d+ needs 0 bytes more than the 8,192 that"
    ):
        step(*chain, RematTool(budget=peak // 20, strict=True))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (3, 3),
        ("2GiB", 2 << 30),
        ("512 MB", 512_000_000),
        ("1.5k", 1500),
        ("7", 7),
        (None, None),
        (torch.tensor([9]).numpy()[0], 9),
    ],
)
def test_budgets_are_numbers_or_texts_with_a_unit(budget: Any, expected: int | None) -> None:
    assert RematTool(budget=budget).result.budget == expected


@pytest.mark.parametrize("budget", ["much", "2 Gib of", "-1", -1, 1.5, True, "3ib"])
def test_other_budgets_are_an_error(budget: Any) -> None:
    with pytest.raises(ToolError, match="give a number of bytes"):
        RematTool(budget=budget)


def test_an_unknown_heuristic_or_cost_is_an_error() -> None:
    with pytest.raises(ToolError, match=r"heuristic is 'h_dtrr'; give one of 'h_dtr'"):
        RematTool(heuristic="h_dtrr")
    with pytest.raises(ToolError, match="cost is 'flops'; give 'time' or 'count'"):
        RematTool(cost="flops")  # type: ignore[arg-type]


def test_ops_that_run_again_are_no_ops_of_the_model(chain: tuple[nn.Module, Run], peak: int) -> None:
    def steps(*tools: amanda.Tool) -> None:
        with amanda.apply(*tools):
            for _ in range(2):  # in the first step, FlopsTool's analysis of the backward pass keeps values
                remat.clear()
                chain[1]().backward()

    plain, flops, remat = FlopsTool(), FlopsTool(), RematTool(budget=peak // 4)
    steps(plain)
    steps(flops, remat)
    assert remat.result.peak <= peak // 4
    assert remat.result.rematerialisations > 20
    assert sorted(flops.result.rows()) == sorted(plain.result.rows())

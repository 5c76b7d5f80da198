"""partition on whole models: loads are even."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.partition import PartitionTool

pytestmark = pytest.mark.slow

SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}


@pytest.fixture(params=["resnet50", "bert", "gpt2"])
def step(request: pytest.FixtureRequest, torchvision: Any, transformers: Any) -> Callable[[], Tensor]:
    """Return a function that computes the loss of a model."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 1000, (2, 32)), torch.tensor([0, 1])
    if request.param == "resnet50":
        model, images = torchvision.models.resnet50(), torch.rand(2, 3, 64, 64)
        return lambda: nn.functional.cross_entropy(model(images), labels)
    if request.param == "bert":
        config = transformers.BertConfig(hidden_size=128, intermediate_size=512, **SMALL)
        bert = transformers.BertForSequenceClassification(config)
        return lambda: bert(tokens, labels=labels).loss
    config = transformers.GPT2Config(
        n_embd=128, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **SMALL
    )
    gpt2 = transformers.GPT2LMHeadModel(config)
    return lambda: gpt2(tokens, labels=tokens).loss


def test_loads_are_even(step: Callable[[], Tensor]) -> None:
    for stages, most in ((2, 0.10), (4, 0.12)):
        tool = PartitionTool(stages=stages)
        with amanda.apply(tool):
            step().backward()  # type: ignore[no-untyped-call]
        assert tool.result.imbalance <= most


def best_of_intervals(costs: Sequence[float], stages: int) -> float:
    """Return the least cost of the slowest of so many intervals, of all cuts of an order into intervals."""
    ends = np.concatenate(([0.0], np.cumsum(costs)))
    sums = sorted({after - before for before, after in combinations(ends.tolist(), 2)})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(ends, stages, sums[middle]) else (middle + 1, high)
    return float(sums[low])


def _fits(ends: Any, stages: int, most: float) -> bool:
    """Return True if stages that are filled one after another, each as far as it goes, hold all ops."""
    at = 0
    for _ in range(stages):
        at = int(np.searchsorted(ends, ends[at] + most, "right")) - 1
    return at == len(ends) - 1


def test_slowest_stage_is_the_best_of_the_order(step: Callable[[], Tensor]) -> None:
    for stages in (2, 4):
        tool, near = PartitionTool(stages=stages, tolerance=0.0), PartitionTool(stages=stages)
        with amanda.apply(tool, near):
            step().backward()  # type: ignore[no-untyped-call]
        exact, default = tool.result, near.result
        best = best_of_intervals(exact.work.total.tolist(), stages)
        # FLOPs are whole numbers, but a share of a place with several calls need not be.
        assert max(one.cost for one in exact.stages) <= best * (1 + 1e-12)
        assert max(one.cost for one in default.stages) <= best * 1.05


def test_no_cut_of_gpt2_into_four_is_much_more_even(transformers: Any) -> None:
    config = transformers.GPT2Config(n_embd=128, bos_token_id=0, eos_token_id=0, **SMALL)
    gpt2, tokens, tool = (
        transformers.GPT2LMHeadModel(config),
        torch.ones(2, 32).long(),
        PartitionTool(stages=4),
    )
    with amanda.apply(tool):
        gpt2(tokens, labels=tokens).loss.backward()
    result = tool.result
    whole = result.work.total.sum()
    heavy = np.flatnonzero(result.work.total > 0.01 * whole).tolist()
    reached = networkx.transitive_closure_dag(networkx.DiGraph(result.work.dependencies))
    assert all(reached.has_edge(*pair) for pair in pairwise(heavy))
    # Each of these ops needs the one before it, so every cut has them in intervals of their order.
    bound = best_of_intervals(result.work.total[heavy].tolist(), 4) * 4 / whole - 1
    assert result.imbalance <= 0.107
    assert bound > 0.07
    assert (1 + result.imbalance) <= 1.1 * (1 + bound)

"""partition on whole models: loads are even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.partition import PartitionResult, PartitionTool

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
        assert isinstance(tool.result, PartitionResult)
        assert tool.result.imbalance <= most

"""Tools whose cost users ask for, what else does the same work, and programs that both run in."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from _models import total
from _tools import Make
from compiled import masked
from models import let_torchvision_load, resnet50
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_fake_quant, default_per_channel_weight_fake_quant
from torch.nn.utils.parametrize import register_parametrization
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import amanda

TOOLS: dict[str, Make] = {
    name: functools.partial(amanda.load_tool, name, **options)
    for name, options in {
        "flops": {}, "nan": {}, "profile": {}, "trace": {}, "stats": {}, "prune": {"sparsity": 0.5},
        "quantize": {"method": "dynamic"},
    }.items()
}  # fmt: skip
FAKE_QUANTIZE, PARAMETRIZE = "torch.ao FakeQuantize", "torch.nn.utils.parametrize"
Program = tuple[nn.Module, Tensor]
Step = Callable[[], object]


@contextmanager
def quantized_attention() -> Iterator[None]:
    """Quantise queries, keys and values of each attention, as the quantize tool does."""
    original, fakes = F.scaled_dot_product_attention, [default_dynamic_fake_quant() for _ in range(3)]

    def attention(*values: Tensor, **options: Any) -> Tensor:
        given = [fake(value) for fake, value in zip(fakes, values, strict=False)]
        return original(*given, *values[3:], **options)

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield


PEERS: dict[str, Callable[[], Any]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "detect_anomaly": torch.autograd.detect_anomaly,
    "torch.profiler": functools.partial(
        torch.profiler.profile, activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ),
    PARAMETRIZE: nullcontext,
    FAKE_QUANTIZE: quantized_attention,
}
"""Contexts that a program runs in; for the last two its model is another, too."""


class Experts(nn.Module):
    """Products with 32 of 64 matrices, which are gathered anew at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 256, 512) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens after their expert.  x: (32, tokens, 256)."""
        return torch.bmm(x, self.weight[torch.randperm(64)[:32]])


WEIGHTED = (nn.Conv2d, nn.Linear, Experts)


def quantized(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose weights and inputs are quantised by torch.ao.

    As in the quantize tool, weights have a scale for each channel, and inputs one for each execution.
    """
    model = copy.deepcopy(model)
    for layer in [module for module in model.modules() if isinstance(module, WEIGHTED)]:
        register_parametrization(layer, "weight", default_per_channel_weight_fake_quant(ch_axis=0))
        inputs = default_dynamic_fake_quant()
        layer.register_forward_pre_hook(lambda _, given, inputs=inputs: (inputs(given[0]), *given[1:]))
    return model


def variants_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the models of the peers that change one."""
    return {FAKE_QUANTIZE: quantized(model), PARAMETRIZE: masked(model, WEIGHTED)}


def layers() -> Program:
    """Return 20 linear layers, whose ops take a few microseconds each."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))), torch.rand(16, 32)


def small_models() -> dict[str, Program]:
    """Return models whose ops have little to compute, from tens of microseconds to a few."""
    let_torchvision_load()
    import timm
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    )
    return {
        "RegNetY-200MF, 2 images of 96 x 96": (timm.create_model("regnety_002"), torch.rand(2, 3, 96, 96)),
        "BERT of 4 layers of 128, 2 x 32 tokens": (BertModel(config), torch.randint(0, 1000, (2, 32))),
        "20 linear layers of 32, batch of 16": layers(),
    }


def llama() -> Program:
    """Return a Llama of four layers, and a prompt of eight tokens."""
    let_torchvision_load()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, vocab_size=1000, pad_token_id=0, **sizes))
    return model.eval(), torch.randint(0, 1000, (1, 8))


def large_models() -> dict[str, Program]:
    """Return a model whose ops have much to compute, and one that gathers its weights."""
    return {
        "ResNet-50, 1 image of 224 x 224": (resnet50(), torch.rand(1, 3, 224, 224)),
        "32 of 64 experts, gathered": (Experts(), torch.rand(32, 8, 256)),
    }


def training(given: Tensor, optimizer: Callable[[Any], Any] | None = None) -> Callable[[nn.Module], Step]:
    """Return a function that returns a model's training step: forward, backward, and the optimizer's step."""

    def program(model: nn.Module) -> Step:
        model.train()
        update = optimizer(model.parameters()).step if optimizer else None

        def step() -> None:
            model.zero_grad()
            total(model(given)).backward()  # type: ignore[no-untyped-call]
            if update:
                update()

        return step

    return program


def generating(given: Tensor) -> Callable[[Any], Step]:
    """Return a function that returns a program of sixteen new tokens."""
    return lambda model: lambda: model.generate(given, max_new_tokens=16, do_sample=False, use_cache=True)

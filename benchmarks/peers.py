"""Whole programs under each tool, and with what else does the tool's work.

Keras' `fit` has the tools alone.  fvcore and TorchLens look at one forward pass, and not at a program.
"""

import copy
import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _measure import QUICK, Times, controls, in_own_process, interleaved, pin_to_one_core, progress
from _measure import seconds_of as seconds
from _models import training
from _tools import Make, scopes
from compiled import masked
from models import let_torchvision_load, resnet50
from torch import Tensor, nn
from torch.ao.quantization import default_fake_quant, default_per_channel_weight_fake_quant
from torch.nn.utils.parametrize import register_parametrization
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import amanda

TOOLS: dict[str, Make] = {
    name: functools.partial(amanda.load_tool, name, **options)
    for name, options in {
        "profile": {}, "flops": {}, "trace": {}, "nan": {}, "quantize": {"method": "qat"}, "prune": {},
    }.items()
}  # fmt: skip
PEERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": functools.partial(
        torch.profiler.profile, activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ),
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "detect_anomaly": torch.autograd.detect_anomaly,
    "torch.ao FakeQuantize": nullcontext,
    "torch.nn.utils.parametrize": nullcontext,
}
TITLE = "{}, training"
Step = Callable[[], object]


class Experts(nn.Module):
    """Products with 32 of 64 matrices, which are gathered anew at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 256, 512) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens after their expert.  x: (32, tokens, 256)."""
        return torch.bmm(x, self.weight[torch.randperm(64)[:32]])


WEIGHTED = (nn.Conv2d, nn.Linear, Experts)


Models = dict[str, tuple[nn.Module, Tensor]]


def models() -> Models:
    """Return models with random weights, each with its input."""
    let_torchvision_load()
    import timm
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=1000, use_cache=False, pad_token_id=0, **sizes)
    image = torch.rand(1, 3, 224, 224)
    return {
        "Llama of 4 layers": (LlamaForCausalLM(config), torch.randint(0, 1000, (1, 64))),
        "ResNet-50": (resnet50(), image),
        "ViT-Tiny": (timm.create_model("vit_tiny_patch16_224"), image),
    }


def small_models() -> Models:
    """Return models of many small ops, and one that gathers weights, each with its input."""
    let_torchvision_load()
    import timm
    from transformers import BertConfig, BertModel, ElectraConfig, ElectraModel

    tiny: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512}
    bert = BertConfig(num_hidden_layers=2, num_attention_heads=2, **tiny)
    electra = ElectraConfig(num_hidden_layers=4, num_attention_heads=4, embedding_size=128, **tiny)
    words = torch.randint(0, 1000, (2, 32))
    mlp = nn.Sequential(*(one for _ in range(20) for one in (nn.Linear(64, 64), nn.ReLU())))
    return {
        "MobileNetV2, batch of 8": (timm.create_model("mobilenetv2_100"), torch.rand(8, 3, 96, 96)),
        "BERT-tiny": (BertModel(bert), words),
        "ELECTRA-tiny": (ElectraModel(electra), words),
        "MLP of 20 layers": (mlp, torch.rand(32, 64)),
        "32 of 64 experts, gathered": (Experts(), torch.rand(32, 8, 256)),
    }


def quantized(model: nn.Module) -> nn.Module:
    """Return a copy of a model that is quantised in training, as torch.ao does it."""
    model = copy.deepcopy(model)
    for layer in [one for one in model.modules() if isinstance(one, WEIGHTED)]:
        register_parametrization(layer, "weight", default_per_channel_weight_fake_quant(ch_axis=0))
        inputs = default_fake_quant()
        layer.register_forward_pre_hook(lambda _, given, inputs=inputs: (inputs(given[0]), *given[1:]))
    return model


def compared(program: Callable[[nn.Module], Step], model: nn.Module) -> Times:
    """Return processor seconds of a program by variant."""
    under = {**controls(), **scopes(TOOLS), **PEERS}
    steps = dict.fromkeys(under, program(model))
    steps["torch.ao FakeQuantize"] = program(quantized(model))
    steps["torch.nn.utils.parametrize"] = program(masked(model, WEIGHTED))
    return interleaved(under, lambda name: seconds(steps[name]), 60, most=40)


def generating(given: Tensor) -> Callable[[Any], Step]:
    """Return a program that generates sixteen tokens."""
    return lambda model: lambda: model.generate(given, max_new_tokens=16, do_sample=False, use_cache=True)


def fit() -> Times:
    """Return processor seconds of Keras' `fit` on eight batches, bare and under each tool."""
    import keras
    import numpy as np

    convolutions = [keras.layers.Conv2D(32, 3, activation="relu") for _ in range(3)]
    ends = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *ends])
    model.compile("sgd", "mse")
    x, y = np.ones((128, 32, 32, 3), np.float32), np.ones((128, 10), np.float32)

    def measure(_: str) -> float:
        return float(seconds(lambda: model.fit(x, y, batch_size=16, verbose=0), time.process_time))

    return interleaved({**controls(), **scopes(TOOLS)}, measure, 60, most=40)


def look(name: str) -> Times:
    """Return processor seconds of an analysis of a model's forward pass, for a process of its own.

    TorchLens leaves torch's functions wrapped.
    """
    import torchlens
    from fvcore.nn import FlopCountAnalysis

    pin_to_one_core()
    model, given = {**models(), **small_models()}[name]
    looks = {
        "fvcore": lambda: FlopCountAnalysis(model, given).total(),
        "TorchLens": lambda: torchlens.trace(copy.deepcopy(model), given),
    }
    return {what: [seconds(program) for _ in range(3)][1:] for what, program in looks.items()}


def benchmark() -> dict[str, Any]:
    """Return seconds by program and variant."""
    pin_to_one_core()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, (model, given) in list(models().items())[: 1 if QUICK else None]:
        progress(f"  {name}")
        found[TITLE.format(name)] = compared(functools.partial(training, example=given), model)
        if name.startswith("Llama"):
            found[f"{name}, 16 new tokens"] = compared(generating(given[:, :8]), model.eval())
    progress("  Keras")
    found["Keras, fit"] = fit()
    small: dict[str, Any] = {}
    for name, (model, given) in list(small_models().items())[: 1 if QUICK else None]:
        progress(f"  {name}")
        small[TITLE.format(name)] = compared(functools.partial(training, example=given), model)
    for into, those in ((found, models()), (small, small_models())):
        for name in [] if QUICK else those:
            progress(f"  {name}, fvcore and TorchLens")
            into[TITLE.format(name)] |= in_own_process(Path(__file__).with_name("peers_look.py"), name)
    return {"programs": found, "small": small}

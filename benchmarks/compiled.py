"""Training steps of a Llama that torch.compile compiled, with tools in its graphs, beside the compiled step.

It is compiled by inductor once for itself, once for each tool, and once with masks written by hand, before
anything is measured.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _measure import QUICK, controls, interleaved, pin_to_one_core, seconds_of
from _models import let_torchvision_load
from _tools import Make, scopes
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool
from amanda.tools.stats import StatsTool

BY_HAND = "the same masks by hand, without Amanda"


TOOLS: dict[str, Make] = {
    "empty tool": amanda.Tool,
    "prune, masks in the graph": lambda: PruneTool(sparsity=0.5),
}
LOOKING: dict[str, Make] = {"flops": FlopsTool, "stats": StatsTool}


class Masked(nn.Module):
    """A weight without the half of it that is smallest."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        kept = weight.abs() > weight.abs().median()
        self.register_buffer("mask", kept.to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with zeros."""
        return weight * self.mask


def masked(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Linear)) -> nn.Module:
    """Return a copy of a model whose layers of some kinds have masks, as users of PyTorch write them."""
    model = copy.deepcopy(model)
    for layer in list(model.modules()):
        if isinstance(layer, kinds):
            register_parametrization(layer, "weight", Masked(layer.weight.detach()))
    return model


def benchmark() -> dict[str, Any]:
    """Return seconds of training steps on one core: model -> variant -> one value a round."""
    pin_to_one_core()
    torch.manual_seed(0)
    backend = "aot_eager" if QUICK else "inductor"
    model, tokens = llama()

    def step_of(model: nn.Module) -> Callable[[], None]:
        compiled = torch.compile(model, backend=backend)

        def step() -> None:
            model.zero_grad()
            compiled(input_ids=tokens, labels=tokens).loss.backward()

        return step

    under = {
        **controls(),
        **scopes(TOOLS, compiled="instrument"),
        **scopes(LOOKING, compiled="instrument"),
        **{f"{name}, op by op": scope for name, scope in scopes(LOOKING).items()},
        BY_HAND: nullcontext,
    }
    steps = dict.fromkeys(under, step_of(model))
    steps[BY_HAND] = step_of(masked(model))
    # Autograd runs backward passes on a thread of its own only for devices: this thread's time is all of it.
    taken = interleaved(under, lambda variant: seconds_of(steps[variant]), 15, 7, 60)
    return {"models": {f"a Llama of {model.config.num_hidden_layers} layers, 256 tokens": taken}}


def llama() -> tuple[nn.Module, Tensor]:
    """Return a Llama, 256 wide, and tokens for it."""
    let_torchvision_load()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    layers = 1 if QUICK else 4
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
    return LlamaForCausalLM(config), torch.randint(0, 1000, (1, 256))

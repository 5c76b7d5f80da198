"""Steps of models that torch.compile compiled, with tools in their graphs, beside the compiled step itself.

Each model is compiled by inductor once for itself, once for each tool, and once with masks written by hand,
before anything is measured.

`python benchmarks/_measure.py benchmarks/compiled_llama.py FILE` measures tools in the graphs of a Llama, and
op by op.
"""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import torch
from _measure import QUICK, Times, controls, interleaved, pin_to_one_core, progress, seconds_of
from _models import PASSES, let_torchvision_load, models
from _tools import Inserting, Make, scopes
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool
from amanda.tools.stats import StatsTool

MODELS = ("ResNet-50", "BERT-base")
PRODUCTS = ("conv2d", "linear")
BY_HAND = "the same masks by hand, without Amanda"


def observing() -> amanda.Tool:
    """Return a tool that looks at the output of each convolution and each product with a weight."""
    calls: list[int] = [0]

    @amanda.observer
    def look(_: Tensor) -> None:
        calls[0] += 1

    return Inserting("after", routine=look, where=lambda context: context.get_op_type() in PRODUCTS)


TOOLS: dict[str, Make] = {
    "empty tool": amanda.Tool,
    "observer at convolutions and products": observing,
    "prune, masks in the graph": lambda: PruneTool(sparsity=0.5),
}


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
    """Return seconds of compiled steps on one core: model -> pass -> variant -> one value a round."""
    pin_to_one_core()
    compiled = functools.partial(torch.compile, backend="eager" if QUICK else "inductor")
    found: dict[str, Any] = {}
    for name in MODELS[: 1 if QUICK else None]:
        pair = models()[name]
        found[name] = {"example": pair.example, "passes": {}}
        for title, passes in list(PASSES.items())[: 1 if QUICK else None]:
            progress(f"  {name}, {title}")
            torch._dynamo.reset()
            model, example = pair.usual()
            under = {**controls(), **scopes(TOOLS, compiled="instrument"), BY_HAND: nullcontext}
            steps = dict.fromkeys(under, passes(compiled(model), example))
            steps[BY_HAND] = passes(compiled(masked(model)), example)
            taken = interleaved(under, lambda variant, steps=steps: seconds_of(steps[variant]), 60, most=60)
            found[name]["passes"][title] = taken
    return {"models": found}


def llama() -> Times:
    """Return seconds of training steps of a compiled Llama, 256 wide, by tool and how it sees the graphs."""
    pin_to_one_core()
    let_torchvision_load()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1 if QUICK else 4, use_cache=False, **sizes))
    compiled = torch.compile(model, backend="aot_eager" if QUICK else "inductor")
    tokens = torch.randint(0, 1000, (1, 256))

    def step() -> None:
        model.zero_grad()
        compiled(input_ids=tokens, labels=tokens).loss.backward()

    tools: dict[str, Make] = {"flops": FlopsTool, "stats": StatsTool}
    under = controls()
    for how in ("instrument", "op by op"):
        options = {"compiled": how} if how == "instrument" else {}
        under |= {f"{name}, {how}": scope for name, scope in scopes(tools, **options).items()}
    # Autograd runs backward passes on a thread of its own only for devices: this thread's time is all of it.
    return interleaved(under, lambda _: seconds_of(step), 60, most=60)

"""A pruning tool with the cache on and off: the worth of analysing each op once."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _measure import BARE, QUICK, pin_to_one_core, progress, steps_in_turns
from _models import PASSES, Made, narrow_bert, narrow_resnet
from _tools import cache_on_and_off

import amanda

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import bert, resnet50
from pruning import PruningTool, magnitude_mask


class LinearPruning(PruningTool):
    """The example's tool for products with a weight; the gradient of that comes from a transposition."""

    def instrumentation(self, context: amanda.OpContext) -> None:
        if context["type"] == "linear":
            weight = context.get_inputs()[context["weight_index"]]
            mask = context["mask"] = magnitude_mask(weight.detach(), self.sparsity)
            context.insert_before_op(self.mask_forward_weight, inputs=[context["weight_index"]], mask=mask)

    def backward_instrumentation(self, context: amanda.OpContext) -> None:
        if "mask" in context and context["backward_type"] == "transpose_backward":
            mask = context["mask"]
            context.insert_after_backward_op(self.mask_backward_gradient, grad_inputs=[0], mask=mask)


def models() -> dict[str, tuple[Made, Callable[[], amanda.Tool]]]:
    """Return ResNet-50 and a BERT of four layers, and the tool that prunes each; small examples."""
    if QUICK:
        return {
            "narrow ResNet-50": (narrow_resnet(), PruningTool),
            "narrow BERT": (narrow_bert(), LinearPruning),
        }
    tokens = torch.randint(0, 100, (1, 32))
    return {
        "ResNet-50, 2 images of 128 x 128": ((resnet50(), torch.rand(2, 3, 128, 128)), PruningTool),
        "BERT, 4 layers, 32 tokens": ((bert(num_hidden_layers=4), tokens), LinearPruning),
    }


def benchmark() -> dict[str, Any]:
    """Return seconds of a step: model -> pass -> variant -> one value a round."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, (made, tool) in models().items():
        found[name] = {}
        for title, passes in PASSES.items():
            progress(f"  {name}, {title}")
            under = {BARE: nullcontext, **cache_on_and_off(tool())}
            found[name][title] = steps_in_turns(passes(*made), under, 3, 3, 20)
    return {"models": found}

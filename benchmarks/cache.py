"""A pruning tool with the cache on and off: what analysing each op once is worth."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _measure import BARE, Variant, interleaved, pin_to_one_core, processor_seconds, progress, script
from _models import PASSES, narrow_resnet
from torch import Tensor, nn

import amanda

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import bert, resnet50
from pruning import PruningTool, magnitude_mask

ON, OFF = "cache on", "cache off"


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


def models(quick: bool) -> dict[str, tuple[nn.Module, Tensor, Callable[[], amanda.Tool]]]:
    """ResNet-50 and a BERT of four layers, and the tool that prunes each; small examples."""
    if quick:
        model, example = narrow_resnet()
        small = bert(num_hidden_layers=2, hidden_size=24, intermediate_size=48)
        return {
            "narrow ResNet-50": (model, example, PruningTool),
            "narrow BERT": (small, torch.randint(0, 100, (1, 32)), LinearPruning),
        }
    return {
        "ResNet-50, 2 images of 128 x 128": (resnet50(), torch.rand(2, 3, 128, 128), PruningTool),
        "BERT, 4 layers, 32 tokens": (
            bert(num_hidden_layers=4),
            torch.randint(0, 100, (1, 32)),
            LinearPruning,
        ),
    }


def variants(tool: amanda.Tool) -> dict[str, Variant]:
    """Bare, and the tool with and without the cache."""

    @contextmanager
    def off() -> Any:
        with amanda.apply(tool), amanda.cache_disabled():
            yield

    def on() -> AbstractContextManager[Any]:
        return amanda.apply(tool)

    return {BARE: nullcontext, ON: on, OFF: off}


def benchmark(quick: bool) -> dict[str, Any]:
    """Seconds of a step: model -> pass -> variant -> one value a round."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, (model, example, make) in models(quick).items():
        found[name] = {}
        for title, passes in PASSES.items():
            progress(f"  {name}, {title}")
            step = passes(model, example)
            under, seconds = variants(make()), 0.0 if quick else 15.0
            found[name][title] = interleaved(
                under, lambda _, step=step: processor_seconds(step), seconds, 1 if quick else 5, 30
            )
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

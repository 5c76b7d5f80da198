"""Steps of models that torch.compile compiled, with tools in their graphs, beside the compiled step itself.

Each model is compiled by inductor once for itself, once for each tool, and once with masks written by hand,
before anything is measured.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _measure import (
    Variant,
    controls,
    interleaved,
    pin_to_one_core,
    processor_seconds,
    progress,
    script,
)
from _models import PASSES, models
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import amanda
from amanda.tools.prune import PruneTool

MODELS = ("ResNet-50", "BERT-base")
PRODUCTS = ("conv2d", "linear")


class Observing(amanda.Tool):
    """Looks at what each convolution and each product with a weight gives."""

    def __init__(self) -> None:
        self.calls = 0
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() in PRODUCTS:
            context.insert_after_op(self._look)

    @amanda.observer
    def _look(self, _: Tensor) -> None:
        self.calls += 1


TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "empty tool": amanda.Tool,
    "observer at convolutions and products": Observing,
    "prune, masks in the graph": lambda: PruneTool(sparsity=0.5),
}
BY_HAND = "the same masks by hand, without Amanda"


class Masked(nn.Module):
    """A weight without the half of it that is smallest."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        kept = weight.abs() > weight.abs().median()
        self.register_buffer("mask", kept.to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with zeros."""
        return weight * self.mask


def masked(model: nn.Module) -> nn.Module:
    """A copy of a model whose convolutions and linear layers have masks, as users of PyTorch write them."""
    model = copy.deepcopy(model)
    for layer in list(model.modules()):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            register_parametrization(layer, "weight", Masked(layer.weight.detach()))
    return model


def variants() -> dict[str, Variant]:
    """What the steps run under."""
    found = controls()
    for name, make in TOOLS.items():
        found[name] = functools.partial(amanda.apply, make(), compiled="instrument")  # type: ignore[arg-type]
    return {**found, BY_HAND: nullcontext}


def benchmark(quick: bool) -> dict[str, Any]:
    """Seconds of compiled steps on one core: model -> pass -> variant -> one value a round."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in models().items():
        if name not in MODELS[: 1 if quick else None]:
            continue
        found[name] = {"example": pair.example, "passes": {}}
        for title, passes in list(PASSES.items())[: 1 if quick else None]:
            progress(f"  {name}, {title}")
            torch._dynamo.reset()
            model, example = pair.twin() if quick else pair.wide()
            compiled = functools.partial(torch.compile, backend="eager" if quick else "inductor")
            step, by_hand = passes(compiled(model), example), passes(compiled(masked(model)), example)
            found[name]["passes"][title] = interleaved(
                variants(), lambda variant, step=step, by_hand=by_hand: processor_seconds(
                    by_hand if variant == BY_HAND else step
                ), 0.0 if quick else 60.0, least=1 if quick else 7, most=60,
            )  # fmt: skip
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

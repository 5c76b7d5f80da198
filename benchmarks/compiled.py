"""Steps of models that torch.compile compiled, with tools in their graphs, beside the compiled step itself.

Each model is compiled by inductor once for itself and once for each tool, before anything is measured.
"""

import functools
from collections.abc import Callable
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
    def _look(self, _: torch.Tensor) -> None:
        self.calls += 1


TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "empty tool": amanda.Tool,
    "observer at convolutions and products": Observing,
    "prune, masks in the graph": lambda: PruneTool(sparsity=0.5),
}


def variants() -> dict[str, Variant]:
    """What the steps run under."""
    found = controls()
    for name, make in TOOLS.items():
        found[name] = functools.partial(amanda.apply, make(), compiled="instrument")  # type: ignore[arg-type]
    return found


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
            compiled = torch.compile(model, backend="eager" if quick else "inductor")
            step = passes(compiled, example)
            found[name]["passes"][title] = interleaved(
                variants(), lambda _, step=step: processor_seconds(step), 0.0 if quick else 60.0,
                least=1 if quick else 7, most=60,
            )  # fmt: skip
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

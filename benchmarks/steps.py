"""Steps of ResNet-50, BERT-base and GPT-2 under tools, beside bare steps and what people use today.

A step of the model as it is used shows the cost as a share of the step, with the step's noise. The
same step of the narrow twin, where the same operators have little to compute, shows the time that is
added, which divided by the step of the model itself is the share without that noise.
"""

import os
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
    wall_seconds,
)
from _models import PASSES, models
from _others import BY_HAND, DispatchMode, FunctionMode, MonkeyPatch, hooks_by_hand, module_hooks
from _tools import AllPoints, Counting, Empty, Routines
from torch import nn

import amanda

BACKWARD_TOO = {
    "empty tool, backward too": Empty(backward=True),
    "routines at all four points, leaves apart": AllPoints(leaves=False),
    "routines at all four points": AllPoints(),
}
SECONDS = {
    ("wide", "forward"): 25.0,
    ("wide", "forward + backward"): 70.0,
    ("twin", "forward"): 10.0,
    ("twin", "forward + backward"): 15.0,
}
FORWARD = {"empty tool": Empty(), "before + after": Routines()}


def variants(model: nn.Module, backward: bool, patch: MonkeyPatch) -> dict[str, Variant]:
    """What the steps run under."""
    found = controls()
    for name, tool in {**FORWARD, **(BACKWARD_TOO if backward else {})}.items():
        found[name] = lambda tool=tool: amanda.apply(tool)  # type: ignore[misc]
    if backward:
        found[f"{BY_HAND} at every backward op"] = hooks_by_hand
        found[f"{BY_HAND}, leaves apart"] = lambda: hooks_by_hand(leaves=False)
    return {
        **found,
        "TorchFunctionMode": FunctionMode,
        "TorchDispatchMode": DispatchMode,
        "monkey-patch": lambda: patch,
        "module hooks": lambda: module_hooks(model),
    }


def seen(model: nn.Module, step: Callable[[], None]) -> dict[str, int]:
    """How many calls of a step each of them sees."""
    counted: dict[str, int] = {}

    def one(name: str) -> Callable[..., None]:
        counted[name] = 0

        def count(*_: Any) -> None:
            counted[name] += 1

        return count

    class Functions(FunctionMode):
        def __torch_function__(self, function: Any, *rest: Any, **named: Any) -> Any:
            counted["TorchFunctionMode"] += 1
            return super().__torch_function__(function, *rest, **named)

    class Dispatches(DispatchMode):
        def __torch_dispatch__(self, function: Any, *rest: Any, **named: Any) -> Any:
            counted["TorchDispatchMode"] += 1
            return super().__torch_dispatch__(function, *rest, **named)

    one("TorchFunctionMode"), one("TorchDispatchMode")
    tool = Counting()
    for around in (
        Functions(), Dispatches(), MonkeyPatch(before=one("monkey-patch")),
        module_hooks(model, one("module hooks")), amanda.apply(tool),
    ):  # fmt: skip
        with around:
            step()
    counted["module hooks"] //= 2
    return {**counted, "Amanda": tool.forward, "Amanda, backward": tool.backward}


def benchmark(quick: bool) -> dict[str, Any]:
    """Seconds of steps: model -> pass -> "wide" and "twin" -> variant -> one value a round.

    Both on one core; "all cores": of bare steps of the wide model on all of them.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, Any] = {}
    for name, pair in models().items():
        model, example = pair.twin() if quick else pair.wide()
        found[name] = {"example": pair.example, "passes": {title: {} for title in PASSES}}
        for title, passes in PASSES.items():
            progress(f"  {name}, {title}, on all cores")
            step = passes(model, example)
            found[name]["passes"][title]["all cores"] = [wall_seconds(step) for _ in range(1 if quick else 8)]
    pin_to_one_core()
    patch = MonkeyPatch()
    for name, pair in models().items():
        for kind in ("twin",) if quick else ("wide", "twin"):
            model, example = getattr(pair, kind)()
            for title, passes in PASSES.items():
                progress(f"  {name}, {title}{', narrow twin' if kind == 'twin' else ''}")
                step, results = passes(model, example), found[name]["passes"][title]
                seconds = 0.0 if quick else SECONDS[kind, title]
                under = variants(model, "backward" in title, patch)
                results[kind] = timed(under, step, seconds, least=1 if quick else 5)
                if kind == "twin":
                    results["seen"] = seen(model, step)
                if quick:
                    results["wide"] = results["twin"]
    return {"models": found}


def timed(
    under: dict[str, Variant], step: Callable[[], None], seconds: float, least: int
) -> dict[str, list[float]]:
    """Seconds of a step in every variant."""
    return interleaved(under, lambda name: processor_seconds(step), seconds, least, most=100)


if __name__ == "__main__":
    script(benchmark, __doc__)

"""Steps of ResNet-50, BERT-base and GPT-2 under tools, beside bare steps and what people use today.

A step of the model as it is used shows the cost as a share of the step, with the step's noise. The
same step of the narrow twin, where the same operators have little to compute, shows the time that is
added, which divided by the step of the model itself is the share without that noise.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import QUICK, Variant, controls, pin_to_one_core, progress, seconds_of, steps_in_turns
from _models import PASSES, models
from _others import BY_HAND, DispatchMode, FunctionMode, MonkeyPatch, hooks_by_hand, module_hooks
from _tools import Inserting, chosen, scopes
from torch import nn

import amanda

TOOLS = chosen("empty tool", "before + after")
BACKWARD_TOO = chosen(
    "empty tool, backward too", "routines at all four points, leaves apart", "routines at all four points"
)
SECONDS = {
    ("wide", "forward"): 25.0,
    ("wide", "forward + backward"): 70.0,
    ("twin", "forward"): 10.0,
    ("twin", "forward + backward"): 15.0,
}


def variants(model: nn.Module, backward: bool, patch: MonkeyPatch) -> dict[str, Variant]:
    """Return the tools and their peers that steps run under."""
    found = controls() | scopes(TOOLS)
    if backward:
        found |= scopes(BACKWARD_TOO)
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
    """Return the number of calls of a step that each of them sees."""
    counted: dict[str, int] = {}

    def counts(name: str) -> Callable[..., None]:
        counted[name] = 0

        def count(*_: Any) -> None:
            counted[name] += 1

        return count

    def mode(base: type, method: str, name: str) -> Any:
        count = counts(name)

        def call(self: Any, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            count()
            return function(*args, **(kwargs or {}))

        return type("Counting", (base,), {method: call})()

    for around in (
        mode(FunctionMode, "__torch_function__", "TorchFunctionMode"),
        mode(DispatchMode, "__torch_dispatch__", "TorchDispatchMode"),
        MonkeyPatch(before=counts("monkey-patch")),
        module_hooks(model, counts("module hooks")),
        amanda.apply(
            Inserting("before", routine=counts("Amanda"), select=[]),
            Inserting("before backward", routine=counts("Amanda, backward"), select=[]),
        ),
    ):
        with around:
            step()
    return {**counted, "module hooks": counted["module hooks"] // 2}


def benchmark() -> dict[str, Any]:
    """Return seconds of steps: model -> pass -> "wide" and "twin" -> variant -> one value a round.

    Both on one core; "all cores": of bare steps of the wide model on all of them.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, Any] = {}
    for name, pair in models().items():
        model, example = pair.twin() if QUICK else pair.wide()
        found[name] = {"example": pair.example, "passes": {title: {} for title in PASSES}}
        for title, passes in PASSES.items():
            progress(f"  {name}, {title}, on all cores")
            step = passes(model, example)
            taken = [seconds_of(step, time.perf_counter) for _ in range(1 if QUICK else 8)]
            found[name]["passes"][title]["all cores"] = taken
    pin_to_one_core()
    patch = MonkeyPatch()
    for name, pair in models().items():
        for kind, (model, example) in pair.both():
            for title, passes in PASSES.items():
                progress(f"  {name}, {title}, {kind}")
                step, results = passes(model, example), found[name]["passes"][title]
                under = variants(model, "backward" in title, patch)
                results[kind] = steps_in_turns(step, under, SECONDS[kind, title], most=100)
                if kind == "twin":
                    results["seen"] = seen(model, step)
                if QUICK:
                    results["wide"] = results["twin"]
    return {"models": found}

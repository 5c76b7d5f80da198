"""Steps of ResNet-50 and BERT-base under tools, beside bare steps and what people use today.

Steps of the model's narrow twin, where the same operators have little to compute, show the time that is
added. Divided by the bare step of the model itself it is the share of that, without that step's noise.
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
MODELS = ("ResNet-50", "BERT-base")
SECONDS = {"forward": 6.0, "forward + backward": 12.0}


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
    """Return seconds of steps: model -> pass -> "all cores", "wide" and "twin", the latter by variant.

    "all cores", "wide": of bare steps of the model on all cores, and on one.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, Any] = {}
    pairs = {name: models()[name] for name in MODELS}
    steps = {
        (name, title): passes(*pair.usual())
        for name, pair in pairs.items()
        for title, passes in PASSES.items()
    }
    for name, pair in pairs.items():
        found[name] = {"example": pair.example, "passes": {title: {} for title in PASSES}}
        for title in PASSES:
            progress(f"  {name}, {title}, on all cores")
            found[name]["passes"][title]["all cores"] = bare_steps(steps[name, title], time.perf_counter)
    pin_to_one_core()
    for (name, title), step in steps.items():
        found[name]["passes"][title]["wide"] = bare_steps(step, time.thread_time)
    patch = MonkeyPatch()
    for name, pair in pairs.items():
        model, example = pair.twin()
        for title, passes in PASSES.items():
            progress(f"  {name}, {title}, twin")
            step, results = passes(model, example), found[name]["passes"][title]
            under = variants(model, "backward" in title, patch)
            results["twin"] = steps_in_turns(step, under, SECONDS[title], most=100)
            results["seen"] = seen(model, step)
    return {"models": found}


def bare_steps(step: Callable[[], None], clock: Callable[[], float]) -> list[float]:
    """Return the seconds of bare steps."""
    return [seconds_of(step, clock) for _ in range(2 if QUICK else 7)][1:]

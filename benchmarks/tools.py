"""What whole tools cost on models: their own routines and the framework apart, with the cache and without.

A tool's own part is the time in its routines, which a clock around each takes, and in the gradients that
autograd computes of them. What the framework adds is taken on a model's narrow twin, where the same operators
have little to compute: what the tool adds to the twin's step, less the tool's own part there.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from _measure import (
    BARE,
    Variant,
    controls,
    interleaved,
    pin_to_one_core,
    processor_seconds,
    progress,
    script,
)
from _models import PASSES, models
from _wrapping import wrap
from torch.utils._pytree import tree_leaves

import amanda
from amanda.action import Routine

Tools = Mapping[str, Callable[[], amanda.Tool]]

TOOLS: Tools = {
    "trace": lambda: amanda.load_tool("trace"),
    "flops": lambda: amanda.load_tool("flops"),
    "stats": lambda: amanda.load_tool("stats"),
    "effective path": lambda: amanda.load_tool("effective_path"),
    "prune": lambda: amanda.load_tool("prune", sparsity=0.5),
    "prune, 2:4": lambda: amanda.load_tool("prune", pattern="2:4"),
    "quantize, dynamic": lambda: amanda.load_tool("quantize", method="dynamic"),
    "quantize, qat": lambda: amanda.load_tool("quantize", method="qat"),
}
QUICK = ("trace", "prune", "quantize, qat")
SECONDS = {"wide": 60.0, "twin": 20.0}
ON, OFF = "cache on", "cache off"


class Clock:
    """The time in the routines of a tool and of those that it depends on, and in their gradients."""

    def __init__(self, tool: amanda.Tool) -> None:
        self.seconds = 0.0
        self._begun = 0.0
        wrap(tool, self._timed)

    def _timed(self, routine: Routine) -> Routine:
        def timed(*values: Any, **kwargs: Any) -> Any:
            self._start()
            try:
                result = routine(*values, **kwargs)
            finally:
                self._stop()
            for node in made_between(values, result):
                node.register_prehook(self._start)
                node.register_hook(self._stop)
            return result

        return timed

    def _start(self, *_: Any) -> None:
        self._begun = time.thread_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.thread_time() - self._begun


def made_between(values: Any, result: Any) -> Iterator[Any]:
    """The autograd nodes that lead from a result to values, those of the values left out."""
    known = {tensor.grad_fn for tensor in tensors_in(values)}
    left = [tensor.grad_fn for tensor in tensors_in(result)]
    while left:
        node = left.pop()
        if node is not None and node not in known and node.name() != "torch::autograd::AccumulateGrad":
            known.add(node)
            yield node
            left += [after for after, _ in node.next_functions]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Those among values and what they are made of."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def under_tools(step: Callable[[], None], tools: Tools, seconds: float, least: int) -> dict[str, Any]:
    """Seconds of steps, bare and under each tool; and, of clocked steps, seconds in the routines."""
    found: dict[str, Variant] = controls()
    for name, make in tools.items():
        found[name] = functools.partial(amanda.apply, make())
    clocks = {}
    for name, make in tools.items():
        tool = make()
        clocks[f"{name}, clocked"] = Clock(tool)
        found[f"{name}, clocked"] = functools.partial(amanda.apply, tool)
    inside: dict[str, list[float]] = {name: [] for name in tools}

    def measure(name: str) -> float:
        clock = clocks.get(name)
        before = clock.seconds if clock else 0.0
        taken = processor_seconds(step)
        if clock:
            inside[name.removesuffix(", clocked")].append(clock.seconds - before)
        return taken

    whole = interleaved(found, measure, seconds, least, most=40)
    rounds = len(whole[BARE])
    return {
        "whole": {name: taken for name, taken in whole.items() if name not in clocks},
        "inside": {name: taken[-rounds:] for name, taken in inside.items()},
    }


def with_and_without_cache(
    step: Callable[[], None], tools: Tools, least: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of steps under each tool with the cache on and off."""
    found = {}
    for name, make in tools.items():
        tool = make()

        @contextmanager
        def off(tool: amanda.Tool = tool) -> Any:
            with amanda.apply(tool), amanda.cache_disabled():
                yield

        def on(tool: amanda.Tool = tool) -> AbstractContextManager[Any]:
            return amanda.apply(tool)

        found[name] = interleaved({ON: on, OFF: off}, lambda _: processor_seconds(step), 0.0, least)
    return found


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> pass -> "wide", "twin" and "cache" -> seconds of steps, one value a round."""
    pin_to_one_core()
    tools = {name: make for name, make in TOOLS.items() if not quick or name in QUICK}
    found: dict[str, Any] = {}
    for name, pair in models().items():
        if name.startswith("GPT") or (quick and found):
            continue
        found[name] = {"example": pair.example, "passes": {title: {} for title in PASSES}}
        for kind in ("twin",) if quick else ("wide", "twin"):
            model, example = getattr(pair, kind)()
            for title, passes in PASSES.items():
                progress(f"  {name}, {title}{', narrow twin' if kind == 'twin' else ''}")
                step, results = passes(model, example), found[name]["passes"][title]
                results[kind] = under_tools(step, tools, 0.0 if quick else SECONDS[kind], 1 if quick else 5)
                if kind == "wide" or quick:
                    results["cache"] = with_and_without_cache(step, tools, 1 if quick else 3)
                if quick:
                    results["wide"] = results["twin"]
    return {"models": found}


if __name__ == "__main__":
    torch.manual_seed(0)
    script(benchmark, __doc__)

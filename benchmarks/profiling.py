"""The profile tool beside torch.profiler: what they say of a training step of BERT-base, and their cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from _measure import controls, interleaved, pin_to_one_core, processor_seconds, progress, script
from _models import models, training
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

import amanda
from amanda.tools.profile import ProfileResult, ProfileTool

LONG = 100.0
"""Microseconds from which on times are to agree."""
OTHER = "torch.profiler"
Spans = dict[str, list[float]]


def benchmark(quick: bool) -> dict[str, Any]:
    """Microseconds: of the same executions, of runs apart; and seconds of a step under each."""
    pin_to_one_core()
    torch.manual_seed(0)
    pair = models()["BERT-base"]
    model, example = (pair.twin if quick else pair.wide)()
    step = training(model, example)
    rounds = 2 if quick else 7
    tool = ProfileTool(memory=False)
    with amanda.apply(tool):
        step()
        step()
    progress("  both at once")
    at_once = [together(tool, step) for _ in range(rounds)]
    progress("  one after the other")
    apart = [(alone(tool, step), of_torch(traced(step))) for _ in range(rounds)]
    progress("  cost")
    both = [pair for mine, his in at_once for pair in paired(mine, his)]
    common = [name for name in apart[0][0] if name in apart[0][1]]
    return {
        "example": pair.example,
        "ops": sum(map(len, apart[0][0].values())),
        "at once": agreement(both),
        "apart": {name: [middle(runs, name) for runs in zip(*apart, strict=True)] for name in common},
        "seconds": cost(step, quick),
    }


def together(tool: ProfileTool, step: Callable[[], None]) -> tuple[Spans, Spans]:
    """Times of one step by both."""
    tool.clear()
    with amanda.apply(tool):
        events = traced(step)
    return of_amanda(tool.result), of_torch(events)


def alone(tool: ProfileTool, step: Callable[[], None]) -> Spans:
    """Times of one step by Amanda."""
    tool.clear()
    with amanda.apply(tool):
        step()
    return of_amanda(tool.result)


def of_amanda(result: ProfileResult) -> Spans:
    """Times by the framework's name of the op."""
    spans: Spans = {}
    for event in result.timeline.events:
        spans.setdefault(event.place.name, []).append(event.took / 1000)
    return spans


def of_torch(events: list[FunctionEvent]) -> Spans:
    """The same of what Python called and of backward ops, with what the engine makes of their gradients."""
    spans: Spans = {}
    for event in sorted(events, key=lambda one: one.time_range.start):
        name, end = event.name.split("::")[-1], event.time_range.end
        above = [one.name for one in around(event)]
        if "Backward" in event.name or name == "AccumulateGrad":
            if event.name.startswith("autograd::engine"):
                continue
            if event.cpu_parent is not None:
                end = max(one.time_range.end for one in event.cpu_parent.cpu_children)
        elif not event.name.startswith("aten::") or any(
            one.startswith(("aten::", "autograd::engine")) for one in above
        ):
            continue
        spans.setdefault(name, []).append(end - event.time_range.start)
    return spans


def around(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """The events that an event lies in."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def traced(step: Callable[[], None]) -> list[FunctionEvent]:
    """What torch.profiler sees of a step."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return list(profiler.events() or ())


def paired(mine: Spans, his: Spans) -> Iterator[tuple[float, float]]:
    """Times of the same executions."""
    for name, spans in mine.items():
        if len(spans) == len(his.get(name, ())):
            yield from zip(spans, his[name], strict=True)


def agreement(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """How many are long, what share of those agrees within a tenth, and how the ratio spreads."""
    ratios = np.asarray([one / other for one, other in pairs if other > LONG] or [np.nan])
    return {
        "pairs": len(pairs), "long": len(ratios), "within": float(np.mean(np.abs(ratios - 1) <= 0.1)),
        "quantiles": [float(value) for value in np.quantile(ratios, [0.05, 0.5, 0.95])],
    }  # fmt: skip


def middle(runs: tuple[Spans, ...], name: str) -> float:
    """The median of what several runs took in ops of one name."""
    return float(np.median([sum(spans[name]) for spans in runs]))


def cost(step: Callable[[], None], quick: bool) -> dict[str, list[float]]:
    """Processor seconds of a step, once a round."""
    tools = {
        "ProfileTool, times alone": ProfileTool(memory=False, limit=0),
        "ProfileTool": ProfileTool(limit=0),
    }
    tools["ProfileTool, with a timeline"] = ProfileTool()
    under: dict[str, Any] = {
        **controls(),
        **{name: (lambda tool=tool: in_scope(tool)) for name, tool in tools.items()},
        OTHER: lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True),
    }

    def measure(name: str) -> float:
        return min(processor_seconds(step) for _ in range(2))

    return interleaved(under, measure, 0 if quick else 60, least=2 if quick else 7, most=15)


@contextmanager
def in_scope(tool: ProfileTool) -> Iterator[None]:
    """A scope with a tool that has nothing recorded yet."""
    tool.clear()
    with amanda.apply(tool):
        yield


if __name__ == "__main__":
    script(benchmark, __doc__)

"""The profile tool beside torch.profiler: what they say of a training step of BERT-base."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from _measure import QUICK, pin_to_one_core, progress
from _models import models, training
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

import amanda
from amanda.tools.profile import ProfileResult, ProfileTool

LONG = 100.0
"""Microseconds from which on times are to agree."""
torch_profiler = functools.partial(torch.profiler.profile, activities=[ProfilerActivity.CPU], acc_events=True)
Spans = dict[str, list[float]]


def benchmark() -> dict[str, Any]:
    """Return microseconds: of the same executions, and of runs apart."""
    pin_to_one_core()
    torch.manual_seed(0)
    pair = models()["BERT-base"]
    model, example = pair.usual()
    step = training(model, example)
    rounds = 2 if QUICK else 4
    tool = ProfileTool(memory=False)
    with amanda.apply(tool):
        step()
        step()
    progress("  both at once")
    at_once = [of_step(tool, lambda: of_torch(traced(step))) for _ in range(rounds)]
    progress("  one after the other")
    apart = [(of_step(tool, step)[0], of_torch(traced(step))) for _ in range(rounds)]
    both = [pair for mine, his in at_once for pair in paired(mine, his)]
    common = [name for name in apart[0][0] if name in apart[0][1]]
    return {
        "example": pair.example,
        "at once": agreement(both),
        "apart": {name: [middle(runs, name) for runs in zip(*apart, strict=True)] for name in common},
    }


def of_step(tool: ProfileTool, program: Callable[[], Any]) -> tuple[Spans, Any]:
    """Return Amanda's times of a program, and what the program gives."""
    with in_scope(tool):
        found = program()
    return of_amanda(tool.result), found


def of_amanda(result: ProfileResult) -> Spans:
    """Return times by the framework's name of the op."""
    spans: Spans = {}
    for event in result.timeline.events:
        spans.setdefault(event.place.name, []).append(event.took / 1000)
    return spans


def of_torch(events: list[FunctionEvent]) -> Spans:
    """Return the same of calls from Python and of backward ops, with the engine's work on their gradients."""
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
    """Yield the events that an event lies in."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def traced(step: Callable[[], None]) -> list[FunctionEvent]:
    """Return the events that torch.profiler sees of a step."""
    with torch_profiler() as profiler:
        step()
    return list(profiler.events() or ())


def paired(mine: Spans, his: Spans) -> Iterator[tuple[float, float]]:
    """Yield times of the same executions."""
    for name, spans in mine.items():
        if len(spans) == len(his.get(name, ())):
            yield from zip(spans, his[name], strict=True)


def agreement(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return how many are long, the share of those that agree within a tenth, and quantiles of the ratio."""
    ratios = np.asarray([one / other for one, other in pairs if other > LONG] or [np.nan])
    return {
        "pairs": len(pairs), "long": len(ratios), "within": float(np.mean(np.abs(ratios - 1) <= 0.1)),
        "quantiles": [float(value) for value in np.quantile(ratios, [0.05, 0.5, 0.95])],
    }  # fmt: skip


def middle(runs: tuple[Spans, ...], name: str) -> float:
    """Return the median of what several runs took in ops of one name."""
    return float(np.median([sum(spans[name]) for spans in runs]))


@contextmanager
def in_scope(tool: ProfileTool) -> Iterator[None]:
    """Open a scope with a tool that has nothing recorded yet."""
    tool.clear()
    with amanda.apply(tool):
        yield

"""Cost of an op's first execution, in which it is analysed, and of opening a scope."""

import cProfile
import pstats
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _measure import interleaved, pin_to_one_core, progress, quiet, script
from _tools import AllPoints, Empty, Routines
from torch import nn

import amanda

LAYERS = 32
KINDS = (
    "abs acos asin asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 "
    "lgamma log10 log1p log2 logit negative rad2deg reciprocal round rsqrt sgn sigmoid sign sin sinc sinh "
    "sqrt square tan tanh trunc"
).split()
TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "no routine": amanda.Tool,
    "an empty routine": Empty,
    "inserts before + after": Routines,
    "empty, backward too": lambda: Empty(backward=True),
    "inserts at all four points": AllPoints,
}
PARTS = {
    "identity: place and user's line": "_source _opid _modules",
    "context: inputs in schema order, facts": "_schema _signatures _calls _tensors _reader context namespace",
    "plan: made, combined, kept": "_plan _program _order action",
    "the op's execution by its plan": "_eager _routine",
    "backward: nodes found, hooks": "_backward _autograd",
    "calling analysis routines": "_notes _tools",
}
"""What files of Amanda's are for; those of pluggy tell plugins, others are said as "the rest"."""
PART_OF = {file: part for part, files in PARTS.items() for file in files.split()}


def network() -> nn.Module:
    """Linear and tanh in turn: each op is at a place of its own."""
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(4, 4), nn.Tanh())))


def benchmark(quick: bool) -> dict[str, Any]:
    """Nanoseconds: of kinds met for the first time, of new places, of scopes; and a profile."""
    pin_to_one_core()
    progress("  kinds of ops")
    kinds = first_of_a_kind()
    model, x = network(), torch.randn(4, 4)

    def step() -> None:
        model(x).sum().backward()

    progress("  new places")
    later: dict[str, list[float]] = {name: [] for name in TOOLS}

    def measure(name: str) -> float:
        with amanda.apply(TOOLS[name]()):
            first, *others = (processor_time(step) for _ in range(5))
        later[name].append(sorted(others)[len(others) // 2])
        return first

    under = dict.fromkeys(TOOLS, nullcontext)
    first = interleaved(under, measure, 0.0 if quick else 15.0, 2 if quick else 7, 60)
    later = {name: values[1:] for name, values in later.items()}  # less the round that warmed up
    progress("  scopes")
    return {
        "kinds": kinds,
        "first": first,
        "later": later,
        "ops": 2 * LAYERS + 1,
        "shares": profile(step, 3 if quick else 30),
        "scopes": scopes(10 if quick else 500),
    }


def first_of_a_kind() -> dict[str, tuple[float, float]]:
    """Nanoseconds of a function's first call and of one at a new place later, in a scope."""
    x, found = torch.rand(4, 4), {}
    with quiet(), amanda.apply(Empty()):
        torch.add(x, x)
        for name in KINDS:
            function = getattr(torch, name)
            first, *others = (processor_time(lambda function=function: function(x)) for _ in range(6))
            found[name] = first, sorted(others)[2]
    return found


def processor_time(program: Callable[[], object]) -> float:
    """Nanoseconds of processor time of one run in this thread."""
    start = time.thread_time_ns()
    program()
    return time.thread_time_ns() - start


def profile(step: Callable[[], None], times: int) -> dict[str, float]:
    """Share of the time in Amanda's Python that each question takes in first executions."""
    profiler = cProfile.Profile()
    for _ in range(times):
        with amanda.apply(Empty()):
            profiler.runcall(step)
    shares: dict[str, float] = {}
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        if "pluggy" in path.parts:
            question = "telling plugins"
        elif {"amanda", "benchmarks"} & set(path.parts):
            question = PART_OF.get(path.stem, "the rest")
        else:
            continue
        shares[question] = shares.get(question, 0.0) + own
    whole = sum(shares.values())
    return {question: own / whole for question, own in sorted(shares.items(), key=lambda one: -one[1])}


def scopes(times: int) -> dict[str, list[float]]:
    """Nanoseconds to open and close a scope where none is open, within another, and to switch off."""
    tool, outer = Empty(), Empty()

    def scope() -> None:
        with amanda.apply(tool):
            pass

    def off() -> None:
        with amanda.disabled():
            pass

    def bare() -> None:
        with torch.no_grad():
            pass

    found = {"scope": [processor_time(scope) for _ in range(times)][1:]}
    with amanda.apply(outer):
        found["nested scope"] = [processor_time(scope) for _ in range(times)][1:]
        found["amanda.disabled()"] = [processor_time(off) for _ in range(times)][1:]
    found["torch.no_grad(), for comparison"] = [processor_time(bare) for _ in range(times)][1:]
    return {name: sample(values) for name, values in found.items()}


def sample(values: list[float], most: int = 60) -> list[float]:
    """Values evenly picked."""
    return values[:: max(1, len(values) // most)]


if __name__ == "__main__":
    script(benchmark, __doc__)

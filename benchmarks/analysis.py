"""Cost of an op's first execution, in which it is analysed, and of opening a scope."""

import cProfile
import pstats
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _measure import QUICK, interleaved, pin_to_one_core, progress, quiet, seconds_of
from _tools import FORWARD, POINTS, Inserting, Make
from torch import nn

import amanda

LAYERS = 32
KINDS = (
    "abs acos asin asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 "
    "lgamma log10 log1p log2 logit negative rad2deg reciprocal round rsqrt sgn sigmoid sign sin sinc sinh "
    "sqrt square tan tanh trunc"
).split()
TOOLS: dict[str, Make] = {
    "no routine": amanda.Tool,
    "an empty routine": Inserting,
    "inserts before + after": lambda: Inserting(*FORWARD),
    "empty, backward too": lambda: Inserting(backward=True),
    "inserts at all four points": lambda: Inserting(*POINTS),
}
PARTS = {
    "identity: place and user's line": "_source _opid _modules",
    "context: inputs in schema order, facts": "_schema _signatures _calls _tensors _reader context namespace",
    "plan: made, combined, kept": "_plan _program _order action",
    "the op's execution by its plan": "_eager _routine",
    "backward: nodes found, hooks": "_backward _autograd",
    "calling analysis routines": "_notes _tools",
}
"""Files of Amanda by their parts; files of pluggy tell plugins, others are named "the rest"."""
PART_OF = {file: part for part, files in PARTS.items() for file in files.split()}


def benchmark() -> dict[str, Any]:
    """Return nanoseconds: of kinds met for the first time, of new places, of scopes; and a profile."""
    pin_to_one_core()
    progress("  kinds of ops")
    kinds = first_of_a_kind()
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(4, 4), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(4, 4)  # each op is at a place of its own

    def step() -> None:
        model(x).sum().backward()

    progress("  new places")
    later: dict[str, list[float]] = {name: [] for name in TOOLS}

    def measure(name: str) -> float:
        with amanda.apply(TOOLS[name]()):
            first, *others = (nanoseconds(step) for _ in range(5))
        later[name].append(sorted(others)[len(others) // 2])
        return first

    first = interleaved(dict.fromkeys(TOOLS, nullcontext), measure, 15, most=60)
    later = {name: values[1:] for name, values in later.items()}  # less the round that warmed up
    progress("  scopes")
    return {
        "kinds": kinds,
        "first": first,
        "later": later,
        "ops": 2 * LAYERS + 1,
        "shares": profile(step, 3 if QUICK else 30),
        "scopes": scopes(10 if QUICK else 500),
    }


def first_of_a_kind() -> dict[str, tuple[float, float]]:
    """Return nanoseconds of a function's first call and of one at a new place later, in a scope."""
    x, found = torch.rand(4, 4), {}
    with quiet(), amanda.apply(Inserting()):
        torch.add(x, x)
        for name in KINDS:
            function = getattr(torch, name)
            first, *others = (nanoseconds(lambda function=function: function(x)) for _ in range(6))
            found[name] = first, sorted(others)[2]
    return found


def nanoseconds(program: Callable[[], object]) -> float:
    """Return the processor time of one run in this thread."""
    return seconds_of(program, time.thread_time_ns)


def profile(step: Callable[[], None], times: int) -> dict[str, float]:
    """Return the share of the time in Amanda's Python that each part takes in first executions."""
    profiler = cProfile.Profile()
    for _ in range(times):
        with amanda.apply(Inserting()):
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
    """Return nanoseconds to open and close a scope where none is open, within another, and to switch off."""

    def opened(make: Callable[[], Any]) -> list[float]:
        def program() -> None:
            with make():
                pass

        taken = [nanoseconds(program) for _ in range(times)][1:]
        return taken[:: max(1, len(taken) // 60)]

    tool = Inserting()
    found = {"scope": opened(lambda: amanda.apply(tool))}
    with amanda.apply(Inserting()):
        found["nested scope"] = opened(lambda: amanda.apply(tool))
        found["amanda.disabled()"] = opened(amanda.disabled)
    found["torch.no_grad(), for comparison"] = opened(torch.no_grad)
    return found

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
    "identity: place, module path, user's line": "interceptor/* plan/source torch/_modules",
    "the call: inputs in schema order": "eager/call eager/driver torch/*",
    "tensors: dtypes, shapes, gradients": "plan/tensors torch/_tensors",
    "facts and context": "plan/facts plan/context amanda/namespace",
    "plan: made, combined, kept": "plan/* eager/program",
    "the op's execution by its plan": "eager/execution eager/views plan/routine plan/results torch/_views",
    "calling analysis routines": "plan/notes plan/tools amanda/tool benchmarks/_tools",
    "backward: nodes found, hooks": (
        "eager/backward eager/trace torch/_autograd torch/_graphs torch/_hooks torch/_saved"
    ),
    "what is in force": "scope/* amanda/context",
    "telling plugins": "plan/hooks plugins/* pluggy/*",
}
"""Modules, each after its folder; `*` stands for the others in it."""
PART_OF = {module: part for part, modules in PARTS.items() for module in modules.split()}
OP = ("invoke", "run_backward")
"""Methods that run the op itself, and the backward pass."""


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
    later = {name: values[-len(first[name]) :] for name, values in later.items()}  # less what warmed up
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
    """Return the share of the time in Amanda's Python that each part takes in first executions.

    What a part calls of builtins and libraries is the part's.
    """
    profiler = cProfile.Profile()
    with quiet():
        for _ in range(times):
            with amanda.apply(Inserting()):
                profiler.runcall(step)
    shares: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if own_part := part_of(file):
            shares[own_part] = shares.get(own_part, 0.0) + own
        elif not any(f"'{method}'" in name for method in OP):
            for (caller, _, _), (_, _, taken, _) in callers.items():
                if part := part_of(caller):
                    shares[part] = shares.get(part, 0.0) + taken
    whole = sum(shares.values())
    return {part: taken / whole for part, taken in sorted(shares.items(), key=lambda one: -one[1])}


def part_of(file: str) -> str | None:
    """Return the part that a file belongs to; None for what is not Amanda's, the benchmark itself too.

    Raises LookupError for one of Amanda's in a folder of no part, so that the table leaves nothing out.
    """
    path = Path(file)
    folder = path.parent.name
    module = f"{folder}/{path.stem}"
    ours = any(path.is_relative_to(root) for root in amanda.__path__)
    if not (ours or folder == "pluggy" or module == "benchmarks/_tools"):
        return None
    for name in (module, f"{folder}/*"):
        if name in PART_OF:
            return PART_OF[name]
    raise LookupError(f"{file} is in none of PARTS")


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

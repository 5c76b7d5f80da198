"""Cost per op in a scope, beside a TorchFunctionMode that does nothing."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _measure import BeforeAfterTool, EmptyBackwardTool, EmptyTool, Variant, arguments, publish
from torch.overrides import TorchFunctionMode

import amanda


class NoMode(TorchFunctionMode):
    """Calls the function and nothing else."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def nanoseconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call, on average over `calls`."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def main() -> None:
    """Measure and publish."""
    options = arguments(__doc__ or "")
    calls, rounds = (200, 3) if options.quick else (10_000, 15)
    x, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    programs: dict[str, Callable[[], object]] = {
        "torch.add(x, x)": lambda: torch.add(x, x),
        "x + x": lambda: x + x,
        "x.relu()": lambda: x.relu(),
        "F.relu(x)": lambda: F.relu(x),
        "F.linear(x, w, b)": lambda: F.linear(x, weight, bias),
    }
    empty, empty_backward, before_after = EmptyTool(), EmptyBackwardTool(), BeforeAfterTool()
    variants: dict[str, Variant] = {
        "bare": contextlib.nullcontext,
        "bare again": contextlib.nullcontext,
        "no-op mode": NoMode,
        "empty tool": lambda: amanda.apply(empty),
        "empty, backward too": lambda: amanda.apply(empty_backward),
        "before + after": lambda: amanda.apply(before_after),
    }
    rows = []
    for program, call in programs.items():
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                with variant():
                    nanoseconds(call, 150)
                    taken[name].append(nanoseconds(call, calls))
        median = {name: statistics.median(times) for name, times in taken.items()}
        bare, mode = median["bare"], median["no-op mode"] - median["bare"]
        row = [program, f"{bare:.0f} ns"]
        for name in list(variants)[1:]:
            added = median[name] - bare
            row.append(f"{added:+.0f} ns ({added / mode:.2f})")
        rows.append(row)
    columns = ["op", *variants]
    publish("Added per op (and as a share of what a no-op TorchFunctionMode adds)", columns, rows, options)


if __name__ == "__main__":
    main()

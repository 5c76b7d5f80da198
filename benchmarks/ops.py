"""Added cost per op, forward, beside what people use today."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _measure import BARE, Variant, controls, interleaved, pin_to_one_core, progress, script
from _others import DispatchMode, FunctionMode, MonkeyPatch, module_hooks, scope_elsewhere, switched_off
from _tools import After, BackwardRoutines, Before, Changing, Empty, Handing, Routines
from torch import Tensor, nn

import amanda

BLOCK = 0.004
"""Seconds of one timing: long beside the clock, short beside what disturbs."""
SETTLING = 100
"""Calls before a timing; an op in a loop has its last id after 64."""


def programs() -> dict[str, tuple[Callable[[], Tensor], int, nn.Module | None]]:
    """Programs by name, how many ops each is, and the module that it calls."""
    x, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    trained, shift = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    return {
        "torch.add(a, b)": (lambda: torch.add(x, weight), 1, None),
        "a + b": (lambda: x + weight, 1, None),
        "x.relu()": (lambda: x.relu(), 1, None),
        "F.relu(x)": (lambda: F.relu(x), 1, None),
        "x.mul(2).add(1).relu().neg()": (lambda: x.mul(2).add(1).relu().neg(), 4, None),
        "F.linear(x, w, b)": (lambda: F.linear(x, weight, bias), 1, None),
        "F.linear, w needs a gradient": (lambda: F.linear(x, trained, shift), 1, None),
        "nn.ReLU()(x)": (lambda: relu(x), 1, relu),
        "nn.Linear(4, 4)(x)": (lambda: linear(x), 1, linear),
    }


def variants(module: nn.Module | None, patch: MonkeyPatch) -> dict[str, Variant]:
    """What the programs run under."""
    tools = {
        "empty tool": Empty(),
        "empty tool, backward too": Empty(backward=True),
        "before": Before(),
        "after": After(),
        "before + after": Routines(),
        "before + after, hand values back": Handing(),
        "before, another value": Changing(torch.randn(4, 4)),
        "backward before + after": BackwardRoutines(),
    }
    empty = Empty()
    found: dict[str, Variant] = {
        **controls(),
        "scope in another thread": lambda: scope_elsewhere(empty),
        "disabled in a scope": lambda: switched_off(empty),
    }
    for name, tool in tools.items():
        found[name] = lambda tool=tool: amanda.apply(tool)  # type: ignore[misc]
    found |= {"TorchFunctionMode": FunctionMode, "TorchDispatchMode": DispatchMode}
    found["monkey-patch"] = lambda: patch
    if module is not None:
        found["module hooks"] = lambda: module_hooks(module)
    return found


def settle(call: Callable[[], Tensor]) -> None:
    """Run an op, and its backward if it has one, until nothing new is met."""
    for _ in range(2):
        results = [call() for _ in range(SETTLING)]
        if results[0].requires_grad:
            torch.autograd.backward(results, [torch.ones(4, 4)] * SETTLING)


def nanoseconds(call: Callable[[], object], calls: int) -> float:
    """Processor time of one call, on average over `calls`."""
    turns = itertools.repeat(None, calls)
    start = time.thread_time_ns()
    for _ in turns:
        call()
    return (time.thread_time_ns() - start) / calls


def added(
    program: Callable[[], Tensor], ops: int, under: dict[str, Variant], quick: bool, seconds: float
) -> dict[str, list[float]]:
    """Nanoseconds per op of a program under each variant, once a round."""
    calls: dict[str, int] = {}

    def measure(name: str) -> float:
        if name not in calls:
            settle(program)
            calls[name] = 50 if quick else max(200, int(BLOCK * 1e9 / nanoseconds(program, SETTLING)))
        nanoseconds(program, SETTLING)
        return nanoseconds(program, calls[name]) / ops

    return interleaved(under, measure, 0 if quick else seconds, least=2 if quick else 7, most=60)


def benchmark(quick: bool) -> dict[str, Any]:
    """Nanoseconds per op: program -> variant -> one value a round."""
    pin_to_one_core()
    patch = MonkeyPatch()
    found = {}
    for name, (program, ops, module) in programs().items():
        progress(f"  {name}")
        under = variants(module, patch)
        found[name] = {"ns": added(program, ops, under, quick, seconds=8), "ops": ops}
    return {"programs": found, "base": BARE}


if __name__ == "__main__":
    script(benchmark, __doc__)

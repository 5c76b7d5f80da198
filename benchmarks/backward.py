"""Added cost per backward op: finding the nodes of a graph, hooks on them, routines."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _measure import Variant, controls, interleaved, pin_to_one_core, progress, script
from _others import BY_HAND, DispatchMode, graph, hooks_by_hand
from _tools import AfterBackward, BackwardRoutines, BeforeBackward, Empty
from torch import Tensor, nn

import amanda

LENGTH = 64


def programs() -> dict[str, Callable[[], Tensor]]:
    """Forward passes by name; each makes a graph of a few hundred nodes or fewer."""
    x = torch.randn(4, 4, requires_grad=True)
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(LENGTH // 2)]

    def chain() -> Tensor:
        y = x
        for _ in range(LENGTH):
            y = y.relu()
        return y.sum()

    def layers() -> Tensor:
        y = x
        for weight in weights:
            y = F.linear(y, weight).tanh()
        return y.sum()

    return {f"{LENGTH} relu": chain, f"{LENGTH // 2} linear and tanh": layers}


def variants() -> dict[str, Variant]:
    """What the programs run under."""
    tools = {
        "empty tool": Empty(),
        "empty tool, backward too": Empty(backward=True),
        "routines at one node": BackwardRoutines(limit=1),
        "before": BeforeBackward(),
        "after": AfterBackward(),
        "before + after": BackwardRoutines(),
    }
    found = controls()
    for name, tool in tools.items():
        found[name] = lambda tool=tool: amanda.apply(tool)  # type: ignore[misc]
    return {**found, BY_HAND: hooks_by_hand, "TorchDispatchMode": DispatchMode}


def pass_back(loss: Tensor) -> float:
    """Processor time of a backward pass in nanoseconds."""
    start = time.thread_time_ns()
    loss.backward()  # type: ignore[no-untyped-call]
    return time.thread_time_ns() - start


def benchmark(quick: bool) -> dict[str, Any]:
    """Nanoseconds of a backward pass: program -> variant -> one value a round; and its nodes."""
    pin_to_one_core()
    found = {}
    for title, forward in programs().items():
        progress(f"  {title}")

        def measure(name: str, forward: Callable[[], Tensor] = forward) -> float:
            taken = [pass_back(forward()) for _ in range(3 if quick else 7)]
            return sorted(taken)[len(taken) // 2]

        under, seconds = variants(), 0.0 if quick else 12.0
        taken = interleaved(under, measure, seconds, least=2 if quick else 7, most=60)
        found[title] = {"ns": taken, "nodes": len(graph(forward()))}
    return {"programs": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

"""Added cost per backward op: finding the nodes of a graph, hooks on them, routines."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _measure import QUICK, controls, interleaved, pin_to_one_core, progress, seconds_of
from _others import BY_HAND, DispatchMode, graph, hooks_by_hand
from _tools import BACKWARD, Inserting, chosen, scopes
from torch import Tensor, nn

LENGTH = 64


def at_one_node() -> Inserting:
    """Return a tool with routines at the first backward op."""
    first = iter([True])
    return Inserting(*BACKWARD, where_backward=lambda _: next(first, False))


TOOLS = {
    **chosen("empty tool", "empty tool, backward too"),
    "routines at one node": at_one_node,
    "before": lambda: Inserting("before backward"),
    "after": lambda: Inserting("after backward"),
    "before + after": lambda: Inserting(*BACKWARD),
}


def programs() -> dict[str, Callable[[], Tensor]]:
    """Return forward passes by name; each makes a graph of a few hundred nodes or fewer."""
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


def benchmark() -> dict[str, Any]:
    """Return nanoseconds of a backward pass: program -> variant -> one value a round; and its nodes."""
    pin_to_one_core()
    found = {}
    for title, forward in programs().items():
        progress(f"  {title}")

        def measure(_: str, forward: Callable[[], Tensor] = forward) -> float:
            taken = [seconds_of(forward().backward) for _ in range(3 if QUICK else 7)]  # type: ignore[arg-type]
            return 1e9 * sorted(taken)[len(taken) // 2]

        under = {**controls(), **scopes(TOOLS), BY_HAND: hooks_by_hand, "TorchDispatchMode": DispatchMode}
        found[title] = {"ns": interleaved(under, measure, 6, most=40), "nodes": len(graph(forward()))}
    return {"programs": found}

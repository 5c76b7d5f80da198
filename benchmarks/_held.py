"""Run by memory.py in a process of its own, with PYTHONMALLOC=malloc: bytes in use, by glibc's account.

python _held.py share MODEL TOOL | growth ITERATIONS TOOL
"""

import json
import os
import sys
from typing import Any

import torch
from _allocated import forget_peak, in_use, resident
from _models import models
from torch import Tensor, nn


def share(name: str, tool: str, quick: bool) -> dict[str, int]:
    """What Amanda holds in the middle of a training step, between its forward and its backward pass."""
    start = resident()
    model, example = getattr(models()[name], "twin" if quick else "wide")()
    model.train()
    bare, after = step(model, example), 0
    for _ in range(2):
        forget_peak()
        bare = step(model, example)
    found = {"peak": resident("VmHWM"), "start": start, "after a bare step": in_use()}

    import amanda

    found["import"] = in_use()
    import _tools

    with amanda.apply(_tools.Empty()):
        torch.ones(1)
    found["first scope"] = in_use()
    applied = getattr(_tools, tool)(**({"backward": True} if tool == "Empty" else {}))
    with amanda.apply(applied):
        for _ in range(3):
            during, after = step(model, example), in_use()
    return {**found, "bare": bare, "during": during, "after": after}


def step(model: nn.Module, example: Tensor) -> int:
    """A training step; gives the bytes in use between its forward and its backward pass."""
    model.zero_grad()
    output: Any = model(example)
    loss = (output if isinstance(output, Tensor) else output[0]).sum()
    held = in_use()
    loss.backward()
    model.zero_grad()
    return held


def growth(iterations: int, tool: str) -> list[tuple[int, int, int]]:
    """Iteration, bytes in use and resident bytes, at twenty moments of the training of a small model."""
    from contextlib import nullcontext

    import _tools

    import amanda

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    under: Any = nullcontext() if tool == "bare" else amanda.apply(getattr(_tools, tool)())
    with under:
        for iteration in range(iterations + 1):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if iteration % (iterations // 20) == 0:
                found.append((iteration, in_use(), resident()))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, first, tool = sys.argv[1:4]
    quick = bool(os.environ.get("AMANDA_BENCH_QUICK"))
    print(json.dumps(share(first, tool, quick) if what == "share" else growth(int(first), tool)))

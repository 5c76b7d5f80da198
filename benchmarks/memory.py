"""Memory that Amanda holds during a training step, and over thousands of them, by glibc's account."""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _allocated import MALLOC, forget_peak, in_use, resident
from _measure import QUICK, in_own_process, progress
from torch import nn

MODELS = ("ResNet-50", "BERT-base")
SHARE, GROWTH = Path(__file__).with_name("memory_share.py"), Path(__file__).with_name("memory_growth.py")
AT_ALL = "routines at all four points"
TOOLS = ("empty tool, backward too", AT_ALL)


def benchmark() -> dict[str, Any]:
    """Return bytes: model -> tool -> moment, and in training tool -> (iteration, in use, resident)."""
    if platform.libc_ver()[0] != "glibc":
        return {"missing": "what is in use is read from glibc"}
    shares: dict[str, dict[str, Any]] = {}
    for model in MODELS[: 1 if QUICK else None]:
        progress(f"  {model}")
        tools = TOOLS[-1 if QUICK else 0 :]
        shares[model] = {tool: in_own_process(SHARE, model, tool, **MALLOC) for tool in tools}
    growth = {}
    iterations = "100" if QUICK else "5000"
    for tool in ("bare", AT_ALL):
        progress(f"  {iterations} iterations, {tool}")
        growth[tool] = in_own_process(GROWTH, iterations, tool, **MALLOC)
    return {"shares": shares, "growth": growth}


def share(name: str, tool: str) -> dict[str, int]:
    """Return the bytes in the middle of a training step, between its forward and its backward pass."""
    from _models import models

    torch.set_num_threads(1)
    start = resident()
    model, example = models()[name].usual()
    model.train()
    bare, after = step(model, example), 0
    for _ in range(2):
        forget_peak()
        bare = step(model, example)
    found = {"peak": resident("VmHWM"), "start": start, "after a bare step": in_use()}

    import amanda

    found["import"] = in_use()
    from _tools import TOOLS, Inserting

    with amanda.apply(Inserting()):
        torch.ones(1)
    found["first scope"] = in_use()
    with amanda.apply(TOOLS[tool]()):
        for _ in range(3):
            during, after = step(model, example), in_use()
    return {**found, "bare": bare, "during": during, "after": after}


def step(model: Any, example: Any, account: Callable[[], int] = in_use) -> int:
    """Run a training step; return the bytes in use between its forward and its backward pass."""
    from _models import total

    model.zero_grad()
    loss = total(model(example))
    held = account()
    loss.backward()
    model.zero_grad()
    return held


def growth(iterations: str, tool: str) -> list[tuple[int, int, int]]:
    """Return iteration, bytes in use and resident bytes, at twenty moments of a small model's training."""
    from _tools import TOOLS

    import amanda

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.set_num_threads(1)
    found, every = [], int(iterations) // 20
    under: Any = nullcontext() if tool == "bare" else amanda.apply(TOOLS[tool]())
    with under:
        for iteration in range(int(iterations) + 1):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if iteration % every == 0:
                found.append((iteration, in_use(), resident()))
    return found

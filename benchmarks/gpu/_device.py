"""The device that stages run on: clocks that wait for it, its memory, and models on it."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from _allocated import forget_peak, in_use, resident
from _measure import BARE, Variant, steps_in_turns

DEVICE = torch.device(os.environ.get("AMANDA_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"


def synchronize() -> None:
    """Wait for everything in the queues of the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def wall() -> float:
    """Return seconds of the clock on the wall, once the device is idle."""
    synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Return the bytes of the device that tensors have; on a processor those that are in use at all."""
    return torch.cuda.memory_allocated() if ON_GPU else in_use()


def peak(step: Callable[[], object]) -> int:
    """Return the bytes that a step has at most, beside those of before; on a processor resident ones."""
    synchronize()
    if not ON_GPU:
        forget_peak()
        before = resident()
        step()
        return max(resident("VmHWM") - before, 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def placed(make: Callable[[], Any]) -> Any:
    """Return what a function makes, with tensors on the device."""
    torch.manual_seed(0)
    with DEVICE:
        return make()


def timed(
    step: Callable[[], object], under: Mapping[str, Variant], seconds: float = 2.0, least: int = 7
) -> dict[str, Any]:
    """Return seconds of a step in each variant, once a round, with medians, and those over the bare one."""
    times = steps_in_turns(step, under, seconds, least, most=60, clock=wall)
    middles = {name: statistics.median(values) for name, values in times.items()}
    over = {name: middle / middles[BARE] for name, middle in middles.items()}
    print("    " + ", ".join(f"{name} {over[name]:.3f}" for name in over), flush=True)
    return {"seconds": times, "medians": middles, "over bare": over}

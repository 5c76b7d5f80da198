"""Figure 8 of the paper: kernels of each op of ResNet-50 by the profile tool, beside torch's own accounts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from _cases import Cases
from _device import ON_GPU, peak, placed, synchronize
from _models import models, training
from torch.profiler import profile, supported_activities

import amanda
from amanda.tools.profile import ProfileResult, ProfileTool

MS = 1e-6


def stage(cases: Cases) -> None:
    """Profile a training step of ResNet-50."""
    pair = models()["ResNet-50"]
    step = training(*placed(pair.usual))
    for _ in range(2):
        step()
    cases("ResNet-50: kernels", kernels, step)
    cases("ResNet-50: memory", memory, step)


def profiled(step: Callable[[], None], **options: Any) -> ProfileResult:
    """Return the profile of a step whose ops are known."""
    tool = ProfileTool(**options)
    with amanda.apply(tool):
        step()
        synchronize()
        tool.clear()
        step()
        synchronize()
        return tool.result


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Return ops with their kernels, and the kernels of which torch.profiler counts another number.

    On a processor these are ATen's operators.
    """
    result = profiled(step, kernels=True)
    mine: Counter[str] = Counter()
    ops: dict[tuple[str, str], dict[str, Any]] = {}
    for place in result.places:
        new = {"phase": place.phase, "type": place.type, "calls": 0, "events": 0.0, "kernels": {}}
        op = ops.setdefault((place.phase, place.type), new)
        op["calls"] += place.calls
        op["events"] += MS * (place.device or 0)
        for (name, device), (calls, took) in place.kernels.items():
            if device != "cpu" or not ON_GPU:
                mine[name] += calls
                counted = op["kernels"].setdefault(name, [0, 0.0])
                counted[0] += calls
                counted[1] += MS * took
    with profile(activities=supported_activities(), acc_events=True) as profiler:
        step()
        synchronize()
    events = [one for one in profiler.events() or () if is_kernel(one)]
    theirs = Counter(one.name for one in events)
    other = {name: [mine[name], theirs[name]] for name in mine | theirs if mine[name] != theirs[name]}
    for op in ops.values():
        op["ms"] = sum(took for _, took in op["kernels"].values())
    return {
        "kernels": mine.total(),
        "torch.profiler's": theirs.total(),
        "ms": sum(op["ms"] for op in ops.values()),
        "torch.profiler's ms": sum(took_by(one) for one in events) / 1e3,
        "other counts": dict(list(other.items())[:30]),
        "obstacle": result.obstacle,
        "ops": sorted(ops.values(), key=lambda op: -op["ms"])[:25],
        "amiss": [] if mine.total() else ["no kernel was found"],
    }


def is_kernel(event: Any) -> bool:
    """Return True for an event on the GPU, or on a processor for an operator of ATen."""
    if ON_GPU:
        return bool(event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation)
    return bool(event.name.startswith("aten::"))


def took_by(event: Any) -> float:
    """Return microseconds."""
    return float(event.self_device_time_total if ON_GPU else event.self_cpu_time_total)


def memory(step: Callable[[], None]) -> dict[str, Any]:
    """Return bytes that ops made and their peak, by the profile tool and by the allocator."""
    result = profiled(step)
    mine = sum(place.allocated or 0 for place in result.places)
    found = {
        "made": mine,
        "peaks": {one.device: one.size for one in result.peaks},
        "torch's peak": peak(step),
    }
    if ON_GPU:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        step()
        synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        found["allocated by torch"] = sum(one["size"] for one in history if one["action"] == "alloc")
    else:
        with profile(activities=supported_activities(), profile_memory=True, acc_events=True) as profiler:
            step()
        sizes = [one.self_cpu_memory_usage for one in profiler.events() or ()]
        found["allocated by torch"] = sum(one for one in sizes if one > 0)
    found["by type"] = by_type(result)
    return {**found, "amiss": [] if mine else ["no memory was followed"]}


def by_type(result: ProfileResult) -> dict[str, int]:
    """Return the bytes that ops of each type made, the largest first."""
    sizes: Counter[str] = Counter()
    for place in result.places:
        sizes[f"{place.phase}: {place.type}"] += place.allocated or 0
    return dict(sizes.most_common(15))

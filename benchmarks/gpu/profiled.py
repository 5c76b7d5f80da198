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
    step = training(*placed(models()["ResNet-50"].usual))
    for _ in range(2):
        step()
    cases("ResNet-50: kernels", kernels, step)
    cases("ResNet-50: memory", memory, step)


def profiled(step: Callable[[], None], **options: Any) -> ProfileResult:
    """Return the profile of a step whose ops are known."""
    with amanda.apply(tool := ProfileTool(**options)):
        step()
        synchronize()
        tool.clear()
        step()
        synchronize()
        return tool.result


def of_torch(step: Callable[[], None], **options: Any) -> list[Any]:
    """Return the events that torch.profiler sees of a step."""
    with profile(activities=supported_activities(), acc_events=True, **options) as profiler:
        step()
        synchronize()
    return list(profiler.events() or ())


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Return ops with their kernels, and the kernels of which torch.profiler counts another number.

    On a processor these are ATen's operators.
    """
    result, mine = profiled(step, kernels=True), Counter[str]()
    ops: dict[tuple[str, str], dict[str, Any]] = {}
    for place in result.ops:
        new = {"phase": place.phase, "type": place.type, "calls": 0, "events": 0.0, "ms": 0.0, "kernels": {}}
        op = ops.setdefault((place.phase, place.type), new)
        op["calls"] += place.calls
        op["events"] += MS * (place.device or 0)
        for (name, device), (calls, took) in place.kernels.items():
            if (device != "cpu") == ON_GPU:
                mine[name] += calls
                op["ms"] += MS * took
                runs, before = op["kernels"].get(name, (0, 0.0))
                op["kernels"][name] = (runs + calls, before + MS * took)
    theirs = Counter(
        one.name
        for one in of_torch(step)
        if (one.device_type == torch.autograd.DeviceType.CUDA if ON_GPU else one.name.startswith("aten::"))
    )
    return {
        "kernels": mine.total(),
        "torch.profiler's": theirs.total(),
        "other counts": {
            name: [mine[name], theirs[name]] for name in mine | theirs if mine[name] != theirs[name]
        },
        "obstacle": result.obstacle,
        "ms": sum(op["ms"] for op in ops.values()),
        "ops": sorted(ops.values(), key=lambda op: -op["ms"])[:25],
        "amiss": [] if mine.total() else ["no kernel was found"],
    }


def memory(step: Callable[[], None]) -> dict[str, Any]:
    """Return bytes that ops made and their peak, by the profile tool and by the allocator."""
    result, sizes = profiled(step), Counter[str]()
    for place in result.ops:
        sizes[f"{place.phase}: {place.type}"] += place.allocated or 0
    if ON_GPU:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
        step()
        synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        by_torch = sum(one["size"] for one in history if one["action"] == "alloc")
    else:
        by_torch = sum(max(one.self_cpu_memory_usage, 0) for one in of_torch(step, profile_memory=True))
    return {
        "made": sizes.total(),
        "allocated by torch": by_torch,
        "peaks": {one.device: one.size for one in result.peaks},
        "torch's peak": peak(step),
        "by type": dict(sizes.most_common(15)),
        "amiss": [] if sizes.total() else ["no memory was followed"],
    }

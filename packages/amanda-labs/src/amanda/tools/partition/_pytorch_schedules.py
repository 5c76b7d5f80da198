"""Schedules of `torch.distributed.pipelining` that also add up the gradients of tied parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any


class _Summing:
    """Adds up gradients over the stages that hold a parameter, at the end of a step.

    shared: such parameters, each with the group of the processes that hold it.
    """

    shared: Sequence[tuple[Any, Any]] = ()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the schedule."""
        import torch
        import torch.distributed as dist

        shared = [one for one in self.shared if torch.is_grad_enabled() and one[0].requires_grad]
        earlier = [parameter.grad for parameter, _ in shared]
        for parameter, _ in shared:
            parameter.grad = None
        made = super().step(*args, **kwargs)  # type: ignore[misc]
        for (parameter, group), before in zip(shared, earlier, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient if before is None else before + gradient
        return made


@cache
def summing(name: str) -> Any:
    """Return a schedule of PyTorch whose steps also add up gradients over stages."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    return type(kind.__name__, (_Summing, kind), {})

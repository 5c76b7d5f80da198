"""Tensors of which a process holds a part, or that are still on their way to it."""

from __future__ import annotations

from functools import cache
from typing import Any


def local(tensor: Any) -> Any:
    """What this process holds of a tensor: of a distributed one of PyTorch its shard, of others the whole.

    One that a collective is still making is waited for.  Without a gradient where it is not `tensor` itself.
    """
    if not _is_wrapper(tensor.__class__):
        return tensor
    import torch

    with torch.no_grad():
        if hasattr(tensor, "to_local"):
            tensor = tensor.detach().to_local()
        return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def is_partial(tensor: Any) -> bool:
    """Whether what processes hold of a distributed tensor is yet to be reduced to its values."""
    if not _is_wrapper(tensor.__class__):
        return False
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def share(tensors: Any) -> float:
    """Which share of an op this process computes, by the first distributed tensor that it gives; else 1.

    A result that is sharded, or is yet to be reduced, takes each process its part; a replicated one all.
    """
    for tensor in tensors:
        if _is_wrapper(tensor.__class__) and hasattr(tensor, "placements"):
            whole = tensor.numel()
            held = local(tensor).numel() / whole if whole else 1.0
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            for placement, size in sizes:
                held /= size if placement.is_partial() else 1
            return float(held)
    return 1.0


@cache
def _is_wrapper(kind: Any) -> bool:
    """Whether tensors of a class are distributed ones or results on their way, by what they can do."""
    return hasattr(kind, "to_local") or hasattr(kind, "trigger_wait")

"""Tensors of which a process holds a part, or that are still on their way to it."""

from __future__ import annotations

from functools import cache
from typing import Any


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process holds: the shard of a DTensor, all of any other tensor.

    One that a collective is still making is waited for.  Without a gradient where it is not `tensor` itself.
    """
    if not _is_wrapper(tensor.__class__):
        return tensor
    import torch

    with torch.no_grad():
        if hasattr(tensor, "to_local"):
            tensor = tensor.detach().to_local()
        return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def whole(tensor: Any) -> Any:
    """Return all of a DTensor, which its ranks gather; any other tensor as it is."""
    return tensor.full_tensor() if _is_distributed(tensor.__class__) else tensor


def distributed(tensor: Any, like: Any, placed: bool = False) -> Any:
    """Return a tensor that each rank has as a DTensor beside another one; as it is beside other tensors.

    placed: with the placements of that, else whole on each rank.
    """
    if not _is_distributed(like.__class__) or _is_distributed(tensor.__class__):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    made = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made.redistribute(mesh, like.placements) if placed else made


def is_partial(tensor: Any) -> bool:
    """Return True for a DTensor whose values are a reduction over processes that has not run yet."""
    if not _is_wrapper(tensor.__class__):
        return False
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def share(tensors: Any) -> float:
    """Return the share of an op that this process computes, by the first DTensor among its outputs; else 1.

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
    """Return True for the classes of DTensors and of results of collectives that have not arrived."""
    return hasattr(kind, "to_local") or hasattr(kind, "trigger_wait")


@cache
def _is_distributed(kind: Any) -> bool:
    return hasattr(kind, "full_tensor")

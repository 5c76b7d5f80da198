"""Facts of tensors: their library, the size of their elements, and the part that a process holds."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from amanda.tools.libraries import infer_backend, register_backend

_FRAMEWORKS = ("torch", "tensorflow")


def backend_of(value: Any) -> str:
    """Return autoray's name of the library that computes with a value.

    A subclass of a framework's tensors is that framework's, and autoray's functions take it from then on.
    """
    return _framework_of_class(value.__class__) or str(infer_backend(value))


@cache
def _framework_of_class(kind: Any) -> str | None:
    """Return the library of a class, or the framework that it derives from, known to autoray; or None."""
    own_root, *roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    # autoray is not asked about these libraries' own classes: its import would delay the first step.
    if own_root in (*_FRAMEWORKS, "numpy", "builtins"):
        return str(own_root)
    framework = next((root for root in roots if root in _FRAMEWORKS), None)
    # autoray knows only the module of the class itself, which for a subclass is the user's.
    if framework is not None:
        register_backend(kind, framework)
    return framework


_BITS = re.compile(r"[a-z]+(\d+)")


@cache
def itemsize(dtype: str | None) -> int | None:
    """Return the bytes of an element of a type, by the name that `context["dtype"]` gives; None of another.

    >>> itemsize("bfloat16"), itemsize("complex64"), itemsize("float8_e4m3fn"), itemsize("string")
    (2, 8, 1, None)
    """
    if dtype == "bool":
        return 1
    bits = _BITS.match(dtype or "")
    return (int(bits[1]) + 7) // 8 if bits else None


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process holds: the shard of a DTensor, all of any other tensor.

    Waits for a collective that is still writing it.  A shard has no gradient, `tensor` itself keeps its own.
    """
    if not _is_wrapper(tensor.__class__):
        return tensor
    import torch

    # The local part must not take part in the program's autograd.
    with torch.no_grad():
        if hasattr(tensor, "to_local"):
            tensor = tensor.detach().to_local()
        return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def whole(tensor: Any) -> Any:
    """Return all of a DTensor, which its ranks gather; any other tensor as it is."""
    return tensor.full_tensor() if _is_distributed(tensor.__class__) else tensor


def distributed(tensor: Any, like: Any, placed: bool = False) -> Any:
    """Return a tensor as a DTensor on the mesh of `like`; unchanged if it is one, or if `like` is none.

    Args:
        tensor: Has the same elements on each rank.
        like: A DTensor, or any other tensor.
        placed: True to shard the result as `like` is; False to leave it whole on each rank.
    """
    if not _is_distributed(like.__class__) or _is_distributed(tensor.__class__):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    # Unchecked: each rank computes the same tensor, and a check would be a collective.
    mesh = like.device_mesh
    dtensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return dtensor.redistribute(mesh, like.placements) if placed else dtensor


def is_partial(tensor: Any) -> bool:
    """Return True for a DTensor whose values are a reduction over processes that has not run yet."""
    if not _is_wrapper(tensor.__class__):
        return False
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def share(tensors: Any) -> float:
    """Return the share of an op's work that this process does, by the first DTensor among its outputs.

    Less than 1 for a result that is sharded or yet to be reduced; 1 for any other result.
    """
    for tensor in tensors:
        if _is_wrapper(tensor.__class__) and hasattr(tensor, "placements"):
            total = tensor.numel()
            fraction = local(tensor).numel() / total if total else 1.0
            for placement, rank_count in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
                # Each rank has a value of full size, but computed one share of the sum.
                if placement.is_partial():
                    fraction /= rank_count
            return float(fraction)
    return 1.0


@cache
def _is_wrapper(kind: Any) -> bool:
    """Return True for the classes of DTensors and of results of collectives that have not arrived."""
    return hasattr(kind, "to_local") or hasattr(kind, "trigger_wait")


@cache
def _is_distributed(kind: Any) -> bool:
    return hasattr(kind, "full_tensor")

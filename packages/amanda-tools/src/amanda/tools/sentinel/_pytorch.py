"""Tensors of PyTorch for the sentinel: norms, hashes, and equal bits."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence
from typing import Any

from amanda.tools.kit import leaves

_BLOCK = 1 << 22
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def is_plain(value: Any) -> bool:
    """Return True for a strided tensor with elements, which no subclass interprets."""
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
        and value.numel() > 0
    )


def tensors(values: Any) -> list[Any]:
    """Return the tensors among values, also those in lists."""
    import torch

    return [one for one in leaves(values) if isinstance(one, torch.Tensor)]


def is_view_of(x: Any, others: Sequence[Any]) -> bool:
    """Return True if a tensor is another one than these, in the memory of one of them."""
    if not x._is_view() or any(x is one for one in others):
        return False
    return any(x._base is (one if one._base is None else one._base) for one in others)


def norm(x: Any) -> Any:
    """Return the Euclidean norm of a tensor of floating numbers, in float32 or wider, as a tensor."""
    import torch

    narrow = x.element_size() < 4
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float32 if narrow else None).double().real


def bits(x: Any) -> Any:
    """Return a tensor's elements as integers, in one row."""
    import torch

    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1).contiguous().view(getattr(torch, _INTEGERS[x.element_size()]))


def digest(x: Any) -> Any:
    """Return a hash of a tensor's bits as an int64 tensor on its device.

    On the host it is the CRC-32 of the bytes; elsewhere the sum of all integers, each times an odd number of
    its own, modulo 2**64: no change of a single element leaves it the same.
    """
    import torch

    row = bits(x)
    if row.device.type == "cpu":
        size = row.numel() * row.element_size()
        return torch.tensor(zlib.crc32((ctypes.c_char * size).from_address(row.data_ptr())))
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    for start in range(0, row.numel(), _BLOCK):
        block = row[start : start + _BLOCK].long()
        weights = torch.arange(start, start + len(block), device=row.device).mul_(2).add_(1)
        total += (block * weights).sum()
    return total


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True if two lists of tensors have the same shapes, element types and bits."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(bits(a).equal(bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def difference(given: Sequence[Any], again: Sequence[Any]) -> str:
    """Return how many elements of results differ from those of another run, and the first of them."""
    import torch

    for i, (a, b) in enumerate(zip(given, again, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i} is {tuple(a.shape)} {a.dtype}, and {tuple(b.shape)} {b.dtype} when run again"
        wrong = (bits(a) != bits(b)).nonzero()[:, 0]
        if len(wrong):
            at = int(wrong[0]) // (2 if a.is_complex() else 1)
            wide = torch.complex128 if a.is_complex() else torch.float64
            x, y = (one.detach().reshape(-1) for one in (a, b))
            share = float((x.to(wide) - y.to(wide)).abs().max() / y.to(wide).abs().max())
            size = f", by at most {share:.1e} of the largest" if math.isfinite(share) else ""
            return (
                f"{len(wrong):,} of {a.numel():,} elements of output {i} differ from those of a run with the "
                f"same inputs{size}, the first at {at:,}: {x[at].item()!r} instead of {y[at].item()!r}"
            )
    return f"{len(given)} outputs, and {len(again)} when run again"


def read(norms: Sequence[Any]) -> list[float]:
    """Return numbers that are on any devices, with one transfer for each device."""
    import torch

    places: dict[Any, list[int]] = {}
    for i, one in enumerate(norms):
        places.setdefault(one.device, []).append(i)
    values = [0.0] * len(norms)
    for positions in places.values():
        found = torch.stack([norms[i] for i in positions]).tolist()
        for position, value in zip(positions, found, strict=True):
            values[position] = value
    return values

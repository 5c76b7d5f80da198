"""PyTorch's tensors as blocks of real numbers, and the bins of those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from amanda.tools.mapping import local

if TYPE_CHECKING:
    from torch import Tensor


BLOCK, CACHED_BLOCK = 1 << 22, 1 << 15
"""Numbers that are worked on at once: as many as keep a device busy, or stay in a processor's cache."""


def numbers(tensor: Tensor) -> tuple[Tensor, int]:
    """The numbers that a tensor stores in this process, in one row; how many zeros it does not store."""
    import torch

    tensor = local(tensor).detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    size = tensor.numel()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.is_nested:
        tensor = tensor.values() if tensor.layout is torch.jagged else torch.cat(_flattened(tensor))
        size = tensor.numel()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values() if hasattr(tensor, "values") else tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.abs()
    row = tensor.reshape(-1)
    row = row if type(row) is torch.Tensor else row.as_subclass(torch.Tensor)
    return row, size - row.numel()


def _flattened(tensor: Tensor) -> list[Tensor]:
    return [part.reshape(-1) for part in tensor.unbind()]


def blocks(row: Tensor) -> Iterator[Any]:
    """Parts of a row in the widest floating type of its device; of what is on the host, numpy's arrays."""
    import torch

    device = row.device.type
    wide = torch.float32 if device == "mps" else torch.float64
    for part in torch.split(row, CACHED_BLOCK if device == "cpu" else BLOCK):
        # Torch has no way from some eight-bit types to float64 on every device but through float32.
        block = (part.float() if part.element_size() == 1 else part).to(wide)
        if device == "cpu":  # of a copy, since a storage that numpy has seen cannot change its size
            yield (block.clone() if block is part else block).numpy()
        else:
            yield block


def leading_bits(block: Tensor, bits: int) -> tuple[Tensor, int]:
    """Exponent and first bits of the mantissa of magnitudes, as integers; those of the number 1."""
    import torch

    double = block.dtype == torch.float64
    kind, mantissa, bias = (torch.int64, 52, 1023) if double else (torch.int32, 23, 127)
    return block.abs().view(kind) >> (mantissa - bits), bias << bits


def counts(indices: Tensor, total: int) -> Tensor:
    """Return the number of times that each index occurs; torch.bincount would wait for the device."""
    found = indices.new_zeros(total)
    return found.scatter_add_(0, indices, indices.new_ones(1).expand_as(indices))


def place(tensor: Any) -> str | None:
    """Return where a tensor lies; None for one that has no numbers."""
    device = str(tensor.device)
    return None if device == "meta" else device


def arrays(tensors: list[Tensor]) -> list[Any]:
    """Tensors of one shape as arrays of numpy, fetched at once."""
    import torch

    return list(torch.stack(tensors).cpu().numpy())

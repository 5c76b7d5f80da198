"""PyTorch's tensors of every kind, as plain ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda.tools.mapping import local
from amanda.tools.stats import numbers

if TYPE_CHECKING:
    from torch import Tensor


def plain(tensor: Tensor) -> Tensor | None:
    """What a tensor stores, as real numbers that `isfinite` takes; None on the meta device."""
    import torch

    if tensor.is_meta:
        return None
    tensor = local(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        tensor = numbers(tensor)
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128).abs()  # which does not overflow for those of fewer bits
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)

"""Tensors of PyTorch as bytes and back."""

from __future__ import annotations

from typing import Any

from amanda.tools.partition._channel import Bytes, Form


def packed(tensor: Any) -> tuple[Form, Bytes]:
    """Return the form of a tensor, and its bytes in the order of memory, without a copy where it is dense."""
    import torch

    tensor = tensor.detach()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))
    flat = tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Form(dtype, tuple(tensor.shape), order, flat.numel()), flat.numpy()


def unpacked(form: Form, content: Bytes) -> Any:
    """Return a new tensor of this form."""
    import torch

    made = torch.empty_permuted(form.shape, form.order, dtype=getattr(torch, form.dtype))
    made.permute(form.order).view(-1).view(torch.uint8).copy_(torch.from_numpy(content.copy()))
    return made

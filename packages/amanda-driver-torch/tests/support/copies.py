"""Tensors that are equal to others, bit by bit, and share nothing with them."""

from typing import Any

import torch
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight


def copied(value: Any) -> Any:
    """Return a new tensor with the values and, unless they overlap, the strides of another.

    What is no tensor, has no values yet, or is of a class that cannot be copied, is returned as it is.
    """
    if (
        not isinstance(value, torch.Tensor)
        or torch.nn.parameter.is_lazy(value)
        or type(value) is ExpandedWeight
    ):
        return value
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    # Strides of a sample under a function transform are not those of the batch.
    if not plain or value.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return value.clone()
    overlaps = any(n > 1 and step == 0 for n, step in zip(value.size(), value.stride(), strict=True))
    if value.is_quantized or overlaps:
        return value.clone()
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device).copy_(
        value
    )

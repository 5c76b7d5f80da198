"""PyTorch's tensors of every kind, as plain ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.mapping import local
from amanda.tools.stats import numbers

if TYPE_CHECKING:
    from torch import Tensor


_SCALER = "torch.amp.grad_scaler"
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def roles(context: amanda.OpContext) -> None:
    """Write `loss_scale`: "scale" where a GradScaler scales a loss, "check" where it looks at gradients."""
    if context.is_forward():
        scales = context["type"] == "mul" and _is_called_by_scaler()
        is_check = context.get_op_type() == _CHECK
        context["loss_scale"] = "check" if is_check else "scale" if scales else None


def _is_called_by_scaler() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER:
            return True
        frame = frame.f_back
    return False


def total(tensor: Tensor) -> Tensor:
    """The sum of all elements, with a range that sums of fewer bits do not leave."""
    import torch

    few = tensor.element_size() < 4
    return tensor.sum(dtype=torch.float32) if few else tensor.sum()


def copied(tensor: Tensor) -> Tensor:
    """The tensor as it is now."""
    return tensor.detach().clone()


def plain(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor as real numbers that `isfinite` takes; None on the meta device."""
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

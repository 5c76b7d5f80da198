"""Roles of PyTorch's ops in scaling a loss."""

from __future__ import annotations

import sys
from typing import Any

import amanda

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

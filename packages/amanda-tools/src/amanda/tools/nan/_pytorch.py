"""Roles of PyTorch's ops in scaling a loss, and a quick look at tensors that are plain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import isfinite
from typing import Any

import amanda
from amanda.tools.kit import RequiredNames

_REQUIRED = RequiredNames(
    "amanda.tools.nan",
    "torch",
    "torch:_C._functorch.is_functorch_wrapped_tensor",
    "torch:_C._functorch.is_legacy_batchedtensor",
    "torch:Tensor._version",
)

_SCALER = "torch.amp.grad_scaler"
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def roles(context: amanda.OpContext) -> None:
    """Write `loss_scale`, `are_finite`, `saved` and `unread`.

    loss_scale: "scale" where a GradScaler scales a loss, "check" where it looks at gradients.
    are_finite: returns True only if all elements of some values are finite, and quickly.
    saved: of a backward op, returns the tensors that the node under way has saved.
    unread: of a forward op, returns the positions of inputs that an execution writes and does not read.
    """
    context["are_finite"] = _sum_test()
    if context.is_backward():
        context["saved"] = saved
    if context.is_forward():
        scales = context["type"] == "mul" and _is_called_by_scaler()
        is_check = context.get_op_type() == _CHECK
        context["loss_scale"] = "check" if is_check else "scale" if scales else None
        context["unread"] = partial(_running_statistics_positions, context.get_input_names())


def _running_statistics_positions(names: Sequence[str], values: Sequence[Any]) -> tuple[int, ...]:
    """Return where the running statistics are that a normalization updates from its batch."""
    is_updated = any(
        name in ("training", "train", "use_input_stats") and value is True
        for name, value in zip(names, values, strict=False)
    )
    return tuple(i for i, name in enumerate(names) if is_updated and name in ("running_mean", "running_var"))


def saved() -> list[Any] | None:
    """Return what autograd's node under way has saved; None where hooks give a saved tensor once only."""
    import torch

    node: Any = torch._C._current_autograd_node()
    names = [name for name in dir(node) if name.startswith("_saved_")]
    if hasattr(type(node), "saved_tensors"):
        names.append("saved_tensors")
    try:
        with amanda.disabled():
            return [getattr(node, name) for name in names]
    except Exception:  # a checkpoint's, which recomputes a tensor for one reader
        return None


def _is_called_by_scaler() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER:
            return True
        frame = frame.f_back
    return False


@cache
def _sum_test() -> Callable[[Sequence[Any]], bool]:
    """Return a function that returns True if values are plain tensors of float32, each with a finite sum."""
    _REQUIRED.check()
    import torch

    kinds, float32, strided = (torch.Tensor, torch.nn.Parameter), torch.float32, torch.strided
    functions: Any = torch._C._functorch
    is_wrapped, is_batched = functions.is_functorch_wrapped_tensor, functions.is_legacy_batchedtensor

    def are_finite(values: Sequence[Any]) -> bool:
        for tensor in values:
            if type(tensor) not in kinds or tensor.dtype is not float32 or tensor.layout is not strided:
                return False
            if tensor.is_meta or tensor.is_nested or is_wrapped(tensor) or is_batched(tensor):
                return False
            if not isfinite(tensor.sum().item()):
                return False
        return True

    return are_finite

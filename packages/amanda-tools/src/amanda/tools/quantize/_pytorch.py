"""Quantisation in PyTorch: kernels, and which inputs of ops are quantised."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import amanda

if TYPE_CHECKING:
    from torch import Tensor


def has_kernel(x: Tensor, axes: Sequence[int]) -> bool:
    """Return True if `kernel` takes such a tensor."""
    import torch

    return x.dtype == torch.float32 and len(axes) < 2


def kernel(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, axes: Sequence[int] = ()
) -> Tensor:
    """Return fake quantisation that autograd knows: by PyTorch's kernel on CUDA, elsewhere by its operators.

    PyTorch's kernel goes number by number on the host, five times as slow.
    """
    import torch

    scale, zero_point = scale.detach(), zero_point.detach()
    if x.is_cuda:
        return _fused(x, scale, zero_point, low, high, axes)
    shape = [-1 if axis in axes else 1 for axis in range(x.dim())] if axes else []
    s, z = (one.to(x.device, x.dtype).reshape(shape) for one in (scale, zero_point))
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _straight_through().apply(x, s, z, low, high)[0]
        return result
    return _integers(x, s, z).clamp_(low, high).sub_(z).mul_(s)


def _fused(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, axes: Sequence[int]) -> Tensor:
    """Return what PyTorch's kernel gives, but for NaN, and for what int64 does not hold per channel.

    The kernel takes both for the least value; here NaN stays, the other goes to its end of the grid.
    """
    import torch

    integers = zero_point.to(torch.int32)
    if axes:
        most = (scale * 2.0**62).reshape([-1 if axis == axes[0] else 1 for axis in range(x.dim())])
        held = x.clamp(-most, most)
        made = torch.fake_quantize_per_channel_affine(held, scale, integers, axes[0], low, high)
    else:
        made = torch.fake_quantize_per_tensor_affine(x, scale, integers, low, high)
    with torch.no_grad():
        return torch.clamp(x, min=made, max=made, out=made)


def _integers(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (x * (1 / scale)).round_().add_(zero_point)


@functools.cache
def _straight_through() -> Any:
    """Return the straight-through estimator: a gradient passes where nothing was clipped."""
    import torch

    class StraightThrough(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Any:
            integers = _integers(x, scale, zero_point)
            clipped = integers.clamp(low, high)
            passes = clipped == integers
            return clipped.sub_(zero_point).mul_(scale), passes

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])

        @staticmethod
        def backward(ctx: Any, gradient: Any, _: Any) -> Any:
            (passes,) = ctx.saved_tensors
            with amanda.disabled():
                return gradient * passes, None, None, None, None

    return StraightThrough


_OPERANDS = {
    "linear": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "scaled_dot_product_attention": (0, 1, 2),
    "batch_norm": (0,), "layer_norm": (0,), "group_norm": (0,), "embedding": (0,),
}  # fmt: skip


def describe(context: amanda.OpContext) -> None:
    """Write `operands`, positions of the inputs that may be quantised."""
    kind, count = context["type"], len(context.get_inputs())
    wanted = (0, 1) if kind.startswith("conv") else _OPERANDS.get(kind, range(count))
    context["operands"] = [i for i in wanted if i < count]

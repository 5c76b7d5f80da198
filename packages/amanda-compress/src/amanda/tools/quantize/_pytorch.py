"""The kernel of PyTorch for fake quantisation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import RequiredNames
from amanda.tools.quantize._grid import FloatGrid, Grid

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = RequiredNames("amanda.tools.quantize", "torch", "torch:_C._are_functorch_transforms_active")


SMALL = 1 << 15
"""Elements up to which calls of Python take longer than one pass over the elements."""


def kernel(x: Tensor, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int]) -> Tensor | None:
    """Return fake-quantised values with a gradient, by PyTorch's kernel on CUDA, elsewhere by its operators.

    On the host PyTorch's kernel is five times as slow as its operators.
    Returns None for a tensor of another type than float32, for several axes, and for gradients of float8.
    """
    import torch

    if x.dtype != torch.float32 or len(axes) > 1:
        return None
    if isinstance(grid, FloatGrid) and torch.is_grad_enabled() and x.requires_grad:
        return None
    shape = [-1 if axis in axes else 1 for axis in range(x.dim())] if axes else []
    scale, zero_point = scale.detach(), zero_point.detach()
    if x.is_cuda and not isinstance(grid, FloatGrid):
        return _run_fused_kernel(x, scale, zero_point, grid, axes, shape)
    s, z = (qparam.to(x.device, x.dtype).reshape(shape) for qparam in (scale, zero_point))
    if isinstance(grid, FloatGrid):
        codes: Tensor = (x / s).clamp_(grid.low, grid.high).to(getattr(torch, grid.dtype))
        return codes.to(x.dtype).mul_(s)
    if torch.is_grad_enabled() and x.requires_grad:
        _REQUIRED.check()
        if x.numel() > SMALL or torch._C._are_functorch_transforms_active():
            result: Tensor = _straight_through().apply(x, s, z, grid.low, grid.high)[0]
            return result
        return _with_native_gradient(x, s, z, grid)
    return _integers(x, s, z).clamp_(grid.low, grid.high).sub_(z).mul_(s)


def _run_fused_kernel(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axes: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Return the result of PyTorch's kernel, corrected for NaN, and for integers beyond int64 per channel.

    The kernel makes both the least value; here NaN stays, and large values become an end of the grid.
    """
    import torch

    integers = zero_point.to(torch.int32)
    if axes:
        most = (scale * 2.0**62).reshape(shape)
        clamped = x.clamp(-most, most)
        quantised = torch.fake_quantize_per_channel_affine(
            clamped, scale, integers, axes[0], grid.low, grid.high
        )
    else:
        quantised = torch.fake_quantize_per_tensor_affine(x, scale, integers, grid.low, grid.high)
    with torch.no_grad():
        return torch.clamp(x, min=quantised, max=quantised, out=quantised)


def _with_native_gradient(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return what `_straight_through` does, with the gradient of a product, which autograd computes itself.

    That takes one pass over the elements more, and no call of Python in the backward pass.
    """
    import torch

    with torch.no_grad():
        integers = _integers(x, scale, zero_point)
        clipped = integers.clamp(grid.low, grid.high)
        passes = clipped == integers
    result = x * passes
    with torch.no_grad():
        return torch.mul(clipped.sub_(zero_point), scale, out=result)


def _integers(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (x * (1 / scale)).round_().add_(zero_point)


@functools.cache
def _straight_through() -> Any:
    """Return the straight-through estimator, whose gradient passes where values were not clipped.

    It is for large tensors, and for torch.func's transforms, which take no `out=`.
    """
    import torch

    class StraightThroughRounding(torch.autograd.Function):
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

    return StraightThroughRounding

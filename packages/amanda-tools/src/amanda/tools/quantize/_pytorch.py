"""Quantisation in PyTorch: kernels, and which inputs of ops are quantised."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    """Fake quantisation that autograd knows: PyTorch's own on CUDA, elsewhere in vectorised steps.

    PyTorch's goes number by number on the host, five times as slow.
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
    return _on_grid(x, s, z, low, high)


def _fused(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, axes: Sequence[int]) -> Tensor:
    """PyTorch's kernel.

    It takes NaN, and per channel what int64 does not hold, for the least value: the one stays NaN here, the
    other goes to the end of the grid that it is beyond.
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


def _on_grid(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    return _integers(x, scale, zero_point).clamp_(low, high).sub_(zero_point).mul_(scale)


@functools.cache
def _straight_through() -> Any:
    """`_on_grid` with the straight-through estimator: a gradient passes where nothing was clipped."""
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


# ---- ops ----

_OPERANDS = {
    "linear": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "scaled_dot_product_attention": (0, 1, 2),
    "batch_norm": (0,), "layer_norm": (0,), "group_norm": (0,), "embedding": (0,),
}  # fmt: skip
_KEYWORD_ONLY = frozenset({"scale", "enable_gqa", "alpha", "beta", "out_dtype"})


def describe(context: amanda.OpContext) -> None:
    """Write `operands`, positions of the inputs that may be quantised, and `recompute`."""
    if "operands" in context:
        return
    kind, count = context["type"], len(context.get_inputs())
    wanted = (0, 1) if kind.startswith("conv") else _OPERANDS.get(kind, range(count))
    context["operands"] = [i for i in wanted if i < count]
    context["recompute"] = _recompute(context)


def _recompute(context: amanda.OpContext) -> Callable[[Sequence[Any]], Any] | None:
    """The op as a function of its inputs; None for one that draws random numbers or writes its input."""
    op, names = context.get_op(), context.get_input_names()
    if context["in_place"] or context.get_attrs().get("dropout_p"):
        return None

    def recompute(inputs: Sequence[Any]) -> Any:
        named = dict(zip(names, inputs, strict=False))
        positional = [one for name, one in named.items() if name not in _KEYWORD_ONLY]
        return op(*positional, **{name: one for name, one in named.items() if name in _KEYWORD_ONLY})

    return recompute

"""The arithmetic of quantisation on PyTorch's tensors, and the state of a tool there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import amanda

if TYPE_CHECKING:
    from torch import Tensor


def rint(x: Tensor) -> Tensor:
    """To the nearest integer, half to even."""
    return x.round()


def floor(x: Tensor) -> Tensor:
    """To the integer below."""
    return x.floor()


def absolute(x: Tensor) -> Tensor:
    """Magnitudes."""
    return x.abs()


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Elements of `x` where the condition holds, else of `y`."""
    return x.where(condition, y)


def minimum(x: Tensor, y: Any) -> Tensor:
    """The smaller of each pair; `y` may be a number."""
    return x.clamp(max=y)


def maximum(x: Tensor, y: Any) -> Tensor:
    """The larger of each pair; `y` may be a number."""
    return x.clamp(min=y)


def within(value: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """`value`, and 0 where `x` is not between two bounds; in one pass: comparisons are slow on the host."""
    import torch

    found: Tensor = torch.ops.aten.hardtanh_backward(value, x, low, high)
    return found


def total(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The sum over axes."""
    return x.sum(dim=tuple(axes)) if axes else x


def extent(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The least and the largest elements over axes, outside of autograd."""
    x = x.detach()
    if len(axes) == x.dim():
        least, most = x.aminmax()
        return least, most
    return x.amin(dim=tuple(axes)), x.amax(dim=tuple(axes))  # aminmax over axes takes 20 times as long


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return x.reshape(tuple(shape))


def like(x: Tensor, value: Any) -> Tensor:
    """A number, an array or another tensor in the element type of `x`, on its device."""
    import torch

    return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def wide(x: Tensor) -> Tensor:
    """In float32, or wider as it is."""
    return x.float() if x.element_size() < 4 else x


def as_array(x: Tensor) -> NDArray[Any]:
    """Elements as an array of float32 or wider; of a copy, since numpy lets no storage change its size."""
    return np.asarray(wide(x.detach()).cpu().clone().numpy())


def constant(x: Tensor) -> Tensor:
    """The tensor, outside of autograd."""
    return x.detach()


def is_plain(x: Tensor) -> bool:
    """Whether there is anything to quantise in a tensor: it has elements, and stores each of them."""
    import torch

    return x.layout is torch.strided and not x.is_nested and x.numel() > 0


def has_kernel(x: Tensor, axes: Sequence[int]) -> bool:
    """Whether `kernel` takes such a tensor."""
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
    s, z = (like(x, one).reshape(shape) for one in (scale, zero_point))
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


# ---- state ----


def made(value: Any, reference: Any, trained: bool) -> Tensor:
    """A number or array as state of the tool, in float32 beside `reference`; a Parameter if it is trained."""
    import torch

    tensor = torch.as_tensor(value, dtype=torch.float32, device=reference.device).detach().clone()
    return torch.nn.Parameter(tensor) if trained else tensor


def renewed(former: Tensor, value: Tensor) -> Tensor:
    """A parameter with other values, or these where it is not like them."""
    if former.shape != value.shape or former.device != value.device:
        return value
    assign(former, value)
    return former


def assign(state: Tensor, value: Any) -> None:
    """Write new values into state."""
    import torch

    with torch.no_grad():
        state.copy_(like(state, value))


def read(state: Tensor) -> Tensor:
    """State as a tensor to compute with."""
    return state


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Tensor], collect: Any = None
) -> Tensor:
    """`forward(*tensors)`, whose gradients are `backward(gradient, *tensors)`."""
    result: Tensor = _function().apply(forward, backward, *tensors)
    return result


def _function() -> Any:
    import torch

    global _Function
    if _Function is None:

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, forward: Any, backward: Any, *tensors: Any) -> Any:
                ctx.save_for_backward(*tensors)
                ctx.given = backward
                return forward(*tensors)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, gradient: Any) -> Any:
                with amanda.disabled():
                    return None, None, *ctx.given(gradient, *ctx.saved_tensors)

        _Function = Function
    return _Function


_Function: Any = None


# ---- ops ----

_OPERANDS = {
    "linear": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "scaled_dot_product_attention": (0, 1, 2),
    "batch_norm": (0,), "layer_norm": (0,), "group_norm": (0,), "embedding": (0,),
}  # fmt: skip
_KEYWORD_ONLY = frozenset({"scale", "enable_gqa", "alpha", "beta", "out_dtype"})


def describe(context: amanda.OpContext) -> None:
    """Write `arithmetic`, `operands`, positions of the inputs that may be quantised, and `recompute`."""
    if "operands" in context:
        return
    kind, count = context["type"], len(context.get_inputs())
    wanted = (0, 1) if kind.startswith("conv") else _OPERANDS.get(kind, range(count))
    context["arithmetic"] = sys.modules[__name__]
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

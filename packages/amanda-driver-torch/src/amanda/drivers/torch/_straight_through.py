"""Edges of autograd by which a routine's value stands for another tensor, with the gradient as it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ._levels import in_transform, is_functionalized


class StraightThrough(torch.autograd.Function):
    """A routine's value in the place of an original: the gradient goes to the original as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()  # no view: it may be written in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # an absent gradient stays absent, and no zeros are allocated

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return tangent.view_as(tangent)


class PlainStraightThrough(torch.autograd.Function):
    """The same outside of transforms of torch.func and of forward-mode gradients, at a third of the cost."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()  # no view: it may be written in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


plain_straight_through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = super(
    torch.autograd.Function, PlainStraightThrough
).apply
"""`PlainStraightThrough.apply` without the checks of `Function.apply` for transforms, which cost time."""


class WriteThrough(torch.autograd.Function):
    """A routine's value written into an original: the gradient passes as if nothing was written."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(original)
        ctx.set_materialize_grads(False)
        original.copy_(value)
        return original

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return tangent.mul_(1)  # torch wants to see it written


def straight_through(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` with the identity as its gradient's way back to `original`."""
    # An inference tensor can neither be saved nor enter a graph.
    recorded = original.requires_grad and torch.is_grad_enabled() and not original.is_inference()
    if original.is_nested and original.layout is torch.strided:
        return _cloned_through(original, value) if recorded else value
    if in_transform() and is_functionalized():  # for which torch has no rule of autograd.Function
        return original if recorded or has_tangent(original) else value
    if has_tangent(original) or in_transform():
        return StraightThrough.apply(original, value)  # type: ignore[no-any-return, no-untyped-call]
    if recorded:
        return PlainStraightThrough.apply(original, value)  # type: ignore[no-any-return, no-untyped-call]
    return value


def in_forward_mode() -> bool:
    """Return True while tensors may have forward-mode gradients, by `dual_level` or by a transform."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has a forward-mode gradient."""
    if not in_forward_mode():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _cloned_through(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a clone of `original` that holds `value`: autograd.Function takes no strided nested tensor."""
    clone = original.clone()
    with torch.no_grad():
        for part, part_value in zip(clone.detach().unbind(), value.unbind(), strict=True):
            part.copy_(part_value)
    return clone

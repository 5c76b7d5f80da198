"""Edges of autograd by which a routine's value stands for another tensor; functionalize, which has none.

Torch has no rule of autograd.Function under torch.func.functionalize, and no derivative of a copy into a
tensor, so a value of a routine takes the place of a tensor there only where nothing is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from amanda import interceptor
from amanda.backend import State
from torch.autograd import forward_ad

from ._levels import (
    FUNCTIONALIZE,
    all_layers,
    in_transform,
    is_functionalized,
    layers,
    level_of,
    transforms_in_force,
    without_transforms_above,
)


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
        """Copy the value into the original, and return the original."""
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
    """Return `value` so that its gradient goes to `original` unchanged; no copy where nothing is recorded.

    Under functionalize an original that is differentiated is returned itself, without the value.  For a
    strided nested original that needs a gradient, the result is a clone of it with the numbers of `value`.
    """
    # An inference tensor can neither be saved nor enter a graph.
    is_recorded = original.requires_grad and torch.is_grad_enabled() and not original.is_inference()
    if original.is_nested and original.layout is torch.strided:
        return _cloned_through(original, value) if is_recorded else value
    if in_transform() and is_functionalized():  # for which torch has no rule of autograd.Function
        return original if is_recorded or has_tangent(original) else value
    if has_tangent(original) or in_transform():
        return StraightThrough.apply(original, value)  # type: ignore[no-any-return, no-untyped-call]
    if is_recorded:
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


_VALUE_STAYS = (
    "a value that a routine changes stays as it was, within other transforms and where gradients are computed"
)
_WRITE_IS_LOST = "a write into a view that a differentiable routine replaced reaches the value alone"


def reports_irreplaceable(tensor: torch.Tensor) -> bool:
    """Return True for a tensor whose place no value of a routine can take, after a report that it stays.

    Under other transforms a write into a view of the tensor would not reach the value.
    """
    is_irreplaceable = _is_irreplaceable(tensor)
    if is_irreplaceable:
        _report(_VALUE_STAYS)
    return is_irreplaceable


def report_lost_writes(view: torch.Tensor) -> None:
    """Report that later writes will not reach both a view and the value that replaced it."""
    if _is_irreplaceable(view):
        _report(_WRITE_IS_LOST)


def recompute_stale_views(values: Sequence[Any]) -> None:
    """Compute views anew whose base was written; do nothing but under functionalize.

    To be called while autograd is as in the program.
    """
    # Torch does so at the next read: a routine would read under no_grad, and the view lose its gradient.
    if not is_functionalized():
        return
    for layer in all_layers(values):
        if torch._is_functional_tensor(layer):
            with without_transforms_above(level_of(layer) - 1):
                torch._sync(layer)  # type: ignore[attr-defined, no-untyped-call]


def _is_irreplaceable(tensor: torch.Tensor) -> bool:
    """Return True under functionalize within other transforms, or if the tensor is differentiated."""
    if not is_functionalized():
        return False
    if any(transform.key() != FUNCTIONALIZE for transform in transforms_in_force()):
        return True
    return any(layer.requires_grad or has_tangent(layer) for layer in layers(tensor))


def _report(reason: str) -> None:
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and isinstance(activation.state, State):
        activation.state.report("torch.func.functionalize", reason)

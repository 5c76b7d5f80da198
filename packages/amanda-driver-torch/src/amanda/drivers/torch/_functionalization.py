"""Routines under torch.func.functionalize, which computes writes as new values.

Torch has no rule of autograd.Function there, and no derivative of a copy into a tensor, so a value of a
routine takes the place of a tensor only where nothing is differentiated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from amanda import interceptor
from amanda.backend import State

from ._levels import (
    FUNCTIONALIZE,
    all_layers,
    is_functionalized,
    layers,
    level_of,
    transforms_in_force,
    without_transforms_above,
)
from ._straight_through import has_tangent

_VALUE_STAYS = (
    "a value that a routine changes stays as it was, within other transforms and where gradients are computed"
)
_WRITE_IS_LOST = "a write into a view that a differentiable routine replaced reaches the value alone"


def report_irreplaceable(tensor: torch.Tensor) -> bool:
    """Report a tensor whose place no value of a routine can take, and return True; False for another.

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
    """Compute views anew whose base was written, under functionalize, while autograd is as in the program."""
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

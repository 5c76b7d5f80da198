"""Routines by which a masked model computes what the smaller one will."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import amanda
from amanda.tools.libraries import numpy as np


@amanda.differentiable
def masked(value: Any, mask: Any) -> Any:
    """Return a parameter, or those among a list of tensors, with 0 where it is removed."""
    if isinstance(value, (list, tuple)):
        return [one if own is None else one * own for one, own in zip(value, mask, strict=True)]
    return value * mask


@amanda.differentiable
def selected(value: Any, axis: int, indices: Any) -> Any:
    """Return the channels that are kept, for an op that computes over them."""
    import torch

    return value.index_select(axis, torch.from_numpy(indices).to(value.device))


@amanda.differentiable
def selected_of_array(value: Any, axis: int, indices: Any) -> Any:
    """Return the channels of an array that are kept, for an op that computes over them."""
    return value.take(indices, axis)


def array_over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return what a normalisation of ONNX makes of the channels that are kept, and 0 for the others."""
    own = [
        one.take(indices, axis) if i == 0 else one.take(indices, 0) if _is_vector(names[i], one) else one
        for i, one in enumerate(inputs)
    ]
    found = np.zeros_like(inputs[0])
    found[(slice(None),) * axis + (indices,)] = compute(own)
    return found


def _is_vector(name: str, value: Any) -> bool:
    return value is not None and name.lower() in ("scale", "b", "bias")


def over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return what a normalisation makes of the channels that are kept, and 0 for the others."""
    import torch

    value, own = inputs[0], list(inputs)
    indices = torch.from_numpy(indices).to(value.device)
    own[0] = value.index_select(axis, indices)
    for i, name in enumerate(names):
        if name in ("weight", "bias") and own[i] is not None:
            own[i] = own[i].index_select(0, indices)
        elif name == "normalized_shape":
            own[i] = [len(indices)]
    return value.new_zeros(value.shape).index_copy(axis, indices, compute(own))

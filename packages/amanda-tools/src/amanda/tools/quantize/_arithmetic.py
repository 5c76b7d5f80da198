"""Shapes of scales beside tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

from amanda.tools.kit import tensors_of


def as_array(x: Any) -> NDArray[Any]:
    """Return a tensor as an array of NumPy, in float32 or wider."""
    tensors = tensors_of(x)
    return tensors.to_numpy(tensors.wide(x))


def other_axes(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a tensor that are not among these."""
    return tuple(axis for axis in range(len(x.shape)) if axis not in axes)


def group_size(x: Any, axes: Sequence[int]) -> int:
    """Return how many elements of `x` share one scale."""
    return prod(x.shape[axis] for axis in other_axes(x, axes))


def spread(parameter: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return one number per channel, (channels,), in a shape that broadcasts with `x`; a scalar as it is.

    axes: of the channels in `x`; several are taken together, the last varies fastest.
    """
    if not axes:
        return parameter
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(len(x.shape))]
    return tensors_of(parameter).reshape(parameter, shape)


def summed(x: Any, axes: Sequence[int]) -> Any:
    """Return the sums over all other axes as (channels,); a scalar without axes."""
    return flattened(tensors_of(x).sum(x, other_axes(x, axes)), axes)


def flattened(x: Any, axes: Sequence[int]) -> Any:
    """Return what a reduction over all other axes left as (channels,); a scalar without axes."""
    return tensors_of(x).reshape(x, (-1,)) if axes else x

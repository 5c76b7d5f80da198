"""Which module computes on a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

from amanda.tools.mapping import backend_of
from amanda.tools.quantize import _numpy, _pytorch, _tensorflow

_MODULES: dict[str, ModuleType] = {"torch": _pytorch, "tensorflow": _tensorflow}


def arithmetic(x: Any) -> Any:
    """The module whose functions take a tensor of this type; numpy's for what is an array or a number."""
    return _MODULES.get(backend_of(x), _numpy)


def other_axes(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes that are not among these."""
    return tuple(axis for axis in range(len(x.shape)) if axis not in axes)


def spread(parameter: Any, x: Any, axes: Sequence[int]) -> Any:
    """One number per channel, (channels,), in a shape that broadcasts with `x`; a scalar as it is.

    axes: of the channels in `x`; several are taken together, the last varies fastest.
    """
    if not axes:
        return parameter
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(len(x.shape))]
    return arithmetic(parameter).reshape(parameter, shape)


def flattened(x: Any, axes: Sequence[int]) -> Any:
    """What is left of a reduction over all other axes, as (channels,); a scalar without axes."""
    return arithmetic(x).reshape(x, (-1,)) if axes else x


def group_size(x: Any, axes: Sequence[int]) -> int:
    """How many elements of `x` share one scale."""
    return prod(x.shape[axis] for axis in other_axes(x, axes))

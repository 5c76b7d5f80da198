"""Learned step size quantisation: LSQ (Esser et al. 2020) and LSQ+ with its offset (Bhalgat et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from amanda.tools.kit import tensors_of
from amanda.tools.quantize._grid import EPSILON, Grid, broadcast_channels, group_size, summed


def lsq_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """Return the initial scale of LSQ, 2 mean|x| / sqrt(high): a scalar, or (channels,).

    Source: Esser et al. 2020, sec. 2.1.
    """
    xp = tensors_of(x)
    mean = summed(xp.absolute(xp.wide(x)), axes) / group_size(x, axes)
    return xp.maximum(2 * mean / sqrt(grid.high), EPSILON)


def lsq_plus_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """Return the initial scale of LSQ+ for weights: max(|mean - 3 std|, |mean + 3 std|) / 2^(bits - 1).

    Source: Bhalgat et al. 2020, eq. 10.
    """
    xp, count = tensors_of(x), group_size(x, axes)
    wide = xp.wide(x)
    mean = summed(wide, axes) / count
    std = (summed((wide - broadcast_channels(mean, x, axes)) ** 2, axes) / count) ** 0.5
    return xp.maximum((xp.absolute(mean) + 3 * std) / (1 << (grid.bits - 1)), EPSILON)


def lsq_quantize(x: Any, scale: Any, grid: Grid, offset: Any = None, axes: Sequence[int] = ()) -> Any:
    """Return round(clip((x - offset) / scale, low, high)) * scale + offset, half to even, in `x`'s type.

    scale, offset: scalars, or (channels,) with `axes` of the channels in x; without an offset it is LSQ's.
    Sources: Esser et al. 2020, eqs. 1 and 2; Bhalgat et al. 2020, eqs. 1 and 2.
    """
    xp = tensors_of(x)
    s, shift, v = _divide_by_scale(x, scale, offset, axes)
    result = xp.round(xp.minimum(xp.maximum(v, grid.low), grid.high)) * s
    return xp.cast(result if shift is None else result + shift, x)


def lsq_gradients(
    gradient: Any, x: Any, scale: Any, grid: Grid, offset: Any = None, axes: Sequence[int] = (),
    factor: float = 1.0,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of x, the scale and the offset, if there is one, from that of `lsq_quantize`.

    With v = (x - offset) / scale, inside where low < v < high: x's gradient is the given one inside, else 0.
    The scale's is the sum of the given gradient times round(v) - v inside, and times the nearest end of the
    grid outside.  The offset's is the sum of the given gradient outside.
    factor: `gradient_scale`, which multiplies the gradients of scale and offset.
    Sources: Esser et al. 2020, eqs. 3 and 5; Bhalgat et al. 2020, eqs. 3 to 5.
    """
    xp = tensors_of(x)
    wide = xp.wide(gradient)
    _, _, v = _divide_by_scale(x, scale, offset, axes)
    integers = xp.round(xp.minimum(xp.maximum(v, grid.low), grid.high))
    inside = xp.within(wide, v, grid.low, grid.high)
    by_scale = wide * (integers - xp.within(v, v, grid.low, grid.high))
    gradients = [xp.cast(inside, gradient), xp.cast(summed(by_scale, axes) * factor, scale)]
    if offset is not None:
        gradients.append(xp.cast(summed(wide - inside, axes) * factor, offset))
    return tuple(gradients)


def gradient_scale(count: int, grid: Grid) -> float:
    """Return 1 / sqrt(count * high), which balances the updates of a scale with those of weights.

    count: of the weights, or of the features of one example, that share the scale.
    Source: Esser et al. 2020, sec. 2.2.
    """
    return 1 / sqrt(count * grid.high)


def _divide_by_scale(x: Any, scale: Any, offset: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    xp = tensors_of(x)
    wide = xp.wide(x)
    s = xp.cast(broadcast_channels(scale, x, axes), wide)
    if offset is None:
        return s, None, wide / s
    shift = xp.cast(broadcast_channels(offset, x, axes), wide)
    return s, shift, (wide - shift) / s

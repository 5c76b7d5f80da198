"""Learned step size quantisation: LSQ (Esser et al. 2020) and LSQ+ with its offset (Bhalgat et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from amanda.tools.kit import tensors_of
from amanda.tools.quantize._arithmetic import flattened, group_size, other_axes, spread
from amanda.tools.quantize._grid import EPSILON, Grid


def lsq_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """The step size that LSQ starts from, 2 mean|x| / sqrt(high): a scalar, or (channels,).

    Source: Esser et al. 2020, sec. 2.1.
    """
    xp = tensors_of(x)
    wide = xp.wide(x)
    mean = xp.sum(xp.absolute(wide), other_axes(x, axes)) / group_size(x, axes)
    return flattened(xp.maximum(2 * mean / sqrt(grid.high), EPSILON), axes)


def lsq_plus_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """The step size that LSQ+ starts from for weights: max(|mean - 3 std|, |mean + 3 std|) / 2^(bits - 1).

    Source: Bhalgat et al. 2020, eq. 10.
    """
    xp = tensors_of(x)
    wide, sums, count = xp.wide(x), other_axes(x, axes), group_size(x, axes)
    mean = flattened(xp.sum(wide, sums) / count, axes)
    std = flattened(xp.sum((wide - spread(mean, x, axes)) ** 2, sums) / count, axes) ** 0.5
    return xp.maximum((xp.absolute(mean) + 3 * std) / (1 << (grid.bits - 1)), EPSILON)


def lsq_quantize(x: Any, scale: Any, grid: Grid, offset: Any = None, axes: Sequence[int] = ()) -> Any:
    """round(clip((x - offset) / scale, low, high)) * scale + offset, half to even, in the type of `x`.

    scale, offset: scalars, or (channels,) with `axes` of the channels in x; without an offset it is LSQ's.
    Sources: Esser et al. 2020, eqs. 1 and 2; Bhalgat et al. 2020, eqs. 1 and 2.
    """
    xp = tensors_of(x)
    s, shift, v = _scaled(x, scale, offset, axes)
    result = xp.round(xp.minimum(xp.maximum(v, grid.low), grid.high)) * s
    return xp.cast(result if shift is None else result + shift, x)


def lsq_gradients(
    gradient: Any,
    x: Any,
    scale: Any,
    grid: Grid,
    offset: Any = None,
    axes: Sequence[int] = (),
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """Gradients of x, of the scale and, where there is one, of the offset, from that of `lsq_quantize`.

    With v = (x - offset) / scale: x has the gradient where low < v < high; the scale's is the sum of it
    times round(v) - v there, and times the end of the grid elsewhere; the offset's is the sum of it
    elsewhere.  factor: `gradient_scale`, by which those two are multiplied.
    Sources: Esser et al. 2020, eqs. 3 and 5; Bhalgat et al. 2020, eqs. 3 to 5.
    """
    xp = tensors_of(x)
    wide, sums = xp.wide(gradient), other_axes(x, axes)
    _, _, v = _scaled(x, scale, offset, axes)
    integers = xp.round(xp.minimum(xp.maximum(v, grid.low), grid.high))
    inside = xp.within(wide, v, grid.low, grid.high)
    by_scale = wide * (integers - xp.within(v, v, grid.low, grid.high))
    found = [xp.cast(inside, gradient)]
    found.append(xp.cast(flattened(xp.sum(by_scale, sums), axes) * factor, scale))
    if offset is not None:
        found.append(xp.cast(flattened(xp.sum(wide - inside, sums), axes) * factor, offset))
    return tuple(found)


def gradient_scale(count: int, grid: Grid) -> float:
    """1 / sqrt(count * high), which balances the updates of a scale with those of weights.

    count: of the weights, or of the features of one example, that share the scale.
    Source: Esser et al. 2020, sec. 2.2.
    """
    return 1 / sqrt(count * grid.high)


def _scaled(x: Any, scale: Any, offset: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    xp = tensors_of(x)
    wide = xp.wide(x)
    s = xp.cast(spread(scale, x, axes), wide)
    if offset is None:
        return s, None, wide / s
    shift = xp.cast(spread(offset, x, axes), wide)
    return s, shift, (wide - shift) / s

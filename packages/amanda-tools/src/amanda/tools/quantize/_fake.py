"""Fake quantisation: values of a floating type that lie on the grid of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.tools.quantize._arithmetic import arithmetic, spread
from amanda.tools.quantize._grid import Grid, Rounding


def fake_quantize(
    x: Any,
    scale: Any,
    zero_point: Any,
    grid: Grid,
    axes: Sequence[int] = (),
    rounding: Rounding = "half_even",
) -> Any:
    """(clip(round(x / scale) + zero_point, low, high) - zero_point) * scale, in the type of `x`.

    x: of any framework and shape.  scale, zero_point: float32, scalars, or (channels,) with `axes` of the
    channels in x.  rounding: "half_even" is bit-equal to torch.ao's FakeQuantize, which multiplies by
    1 / scale; "half_up" to TensorFlow's fake_quant_with_min_max_vars, which clips and shifts before it
    rounds, divides by a scalar scale, and multiplies by levels / range per channel; "half_away" rounds as
    C's round does.
    """
    return _values(x, scale, zero_point, grid, axes, rounding)[0]


def fake_quantize_gradient(
    gradient: Any,
    x: Any,
    scale: Any,
    zero_point: Any,
    grid: Grid,
    axes: Sequence[int] = (),
    rounding: Rounding = "half_even",
) -> Any:
    """The gradient that the straight-through estimator lets pass: where `x` was not clipped.

    What rounds to an integer of the grid was not clipped, as in PyTorch; with "half_up" what lies between
    the ends of the grid, as in TensorFlow.  Source: Bengio et al. 2013, sec. 4; Jacob et al. 2018.
    """
    passes = _values(x, scale, zero_point, grid, axes, rounding)[1]
    return arithmetic(gradient).where(passes, gradient, gradient * 0)


def _values(
    x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int], rounding: Rounding
) -> tuple[Any, Any]:
    """The values, and where they were not clipped."""
    xp = arithmetic(x)
    given, x = x, xp.wide(x)
    s, z = (xp.like(x, spread(one, x, axes)) for one in (scale, zero_point))
    if rounding == "half_up":
        result, passes = _as_tensorflow(x, s, z, grid, bool(axes))
    else:
        scaled = x * (1 / s)
        if rounding == "half_even":
            whole = xp.rint(scaled)
        else:
            whole = xp.floor(xp.absolute(scaled) + 0.5)
            whole = xp.where(scaled < 0, -whole, whole)
        integers = whole + z
        clipped = xp.minimum(xp.maximum(integers, grid.low), grid.high)
        result, passes = (clipped - z) * s, clipped == integers
    return xp.like(given, result), passes


def _as_tensorflow(x: Any, s: Any, z: Any, grid: Grid, per_channel: bool) -> tuple[Any, Any]:
    xp = arithmetic(x)
    least, most = (grid.low - z) * s, (grid.high - z) * s
    inverse = xp.like(s, grid.high - grid.low) / (most - least)  # a number over a tensor, torch multiplies
    zero = xp.floor(-least * inverse + 0.5)
    clipped = xp.maximum(xp.minimum(x, most), least)
    shifted = clipped - least
    steps = (shifted * inverse if per_channel else shifted / s) - zero
    return xp.floor(steps + 0.5) * s, clipped == x

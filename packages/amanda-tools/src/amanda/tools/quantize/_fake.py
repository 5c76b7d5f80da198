"""Fake quantisation: values of a floating type that lie on the grid of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import backend_of
from amanda.tools.quantize import _pytorch, _tensorflow
from amanda.tools.quantize._arithmetic import spread
from amanda.tools.quantize._grid import Grid, Rounding

_KERNELS = {"torch": _pytorch, "tensorflow": _tensorflow}


class FixedScale(NamedTuple):
    """Scale and zero point, arrays of NumPy, of a tensor; item: its place in a list of tensors, or None."""

    item: int | None
    scale: Any
    zero_point: Any
    grid: Grid
    axes: Sequence[int]


def fake_quantize(
    x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int] = (),
    rounding: Rounding = "half_even", kernel: bool = True,
) -> Any:  # fmt: skip
    """Return (clip(round(x / scale) + zero_point, low, high) - zero_point) * scale, in the type of `x`.

    NaN stays, and infinity is clipped.
    x: of any framework and shape.  scale, zero_point: float32, scalars, or (channels,) with `axes` of the
    channels in x.  rounding: "half_even" is bit-equal to torch.ao's FakeQuantize, which multiplies by
    1 / scale; "half_up" to TensorFlow's fake_quant_with_min_max_vars, which clips and shifts before it
    rounds, divides by a scalar scale, and multiplies by levels / range per channel; "half_away" rounds as
    C's round does.  kernel: whether one of the framework's may compute it, to the same bits.
    """
    xp = tensors_of(x)
    fused = kernel_for(x, axes, rounding) if kernel else None
    if fused is not None:
        return fused(x, scale, zero_point, grid.low, grid.high, axes)
    wide, s, z = _spread(x, scale, zero_point, axes)
    if rounding == "half_up":
        least, most = (grid.low - z) * s, (grid.high - z) * s
        # A number over a tensor is a product with a reciprocal in torch, which rounds twice.
        inverse = xp.cast(grid.high - grid.low, s) / (most - least)
        shifted = xp.maximum(xp.minimum(wide, most), least) - least
        steps = shifted * inverse if axes else shifted / s
        return xp.cast(xp.floor(steps - xp.floor(-least * inverse + 0.5) + 0.5) * s, x)
    integers = _rounded(wide * (1 / s), rounding) + z
    return xp.cast((xp.minimum(xp.maximum(integers, grid.low), grid.high) - z) * s, x)


def kernel_for(x: Any, axes: Sequence[int], rounding: Rounding) -> Callable[..., Any] | None:
    """Return a fast `kernel(x, scale, zero_point, low, high, axes)` that autodiff knows; None for none."""
    module = _KERNELS.get(backend_of(x)) if rounding == "half_even" else None
    return module.kernel if module is not None and module.has_kernel(x, axes) else None


def straight_through(
    x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int], rounding: Rounding
) -> Any:
    """Return `fake_quantize`, of which the gradient is `fake_quantize_gradient`."""
    fused = kernel_for(x, axes, rounding)
    if fused is not None:
        return fused(x, scale, zero_point, grid.low, grid.high, axes)

    def backward(gradient: Any, x: Any) -> tuple[Any]:
        return (fake_quantize_gradient(gradient, x, scale, zero_point, grid, axes, rounding),)

    def forward(x: Any) -> Any:
        return fake_quantize(x, scale, zero_point, grid, axes, rounding)

    return tensors_of(x).with_gradient(forward, backward, [x])


@amanda.traceable
def fake_quantize_for_good(x: Any, parts: Sequence[FixedScale], rounding: Rounding = "half_even") -> Any:
    """Return a tensor, or a list of which some are, on grids that do not change: tensor code alone."""
    made = list(x) if isinstance(x, (list, tuple)) else x
    for item, scale, zero_point, grid, axes in parts:  # without kernels, which need data that graphs lack
        one = x if item is None else x[item]
        fixed = fake_quantize(one, scale, zero_point, grid, axes, rounding, kernel=False)
        if item is None:
            return fixed
        made[item] = fixed
    return made


def fake_quantize_gradient(
    gradient: Any, x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int] = (),
    rounding: Rounding = "half_even",
) -> Any:  # fmt: skip
    """Return the gradient that the straight-through estimator lets pass: where `x` was not clipped.

    What rounds to an integer of the grid was not clipped, as in PyTorch; with "half_up" what lies between
    the ends of the grid, as in TensorFlow.  Source: Bengio et al. 2013, sec. 4; Jacob et al. 2018.
    """
    wide, s, z = _spread(x, scale, zero_point, axes)
    if rounding == "half_up":
        passes = (wide >= (grid.low - z) * s) & (wide <= (grid.high - z) * s)
    else:
        integers = _rounded(wide * (1 / s), rounding) + z
        passes = (integers >= grid.low) & (integers <= grid.high)
    return tensors_of(gradient).where(passes, gradient, gradient * 0)


def _spread(x: Any, scale: Any, zero_point: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return all three in float32 or wider, in shapes that broadcast."""
    wide = tensors_of(x).wide(x)
    return wide, *(tensors_of(x).cast(spread(one, x, axes), wide) for one in (scale, zero_point))


def _rounded(x: Any, rounding: Rounding) -> Any:
    xp = tensors_of(x)
    if rounding == "half_even":
        return xp.round(x)
    magnitude = xp.floor(xp.absolute(x) + 0.5)
    return xp.where(x < 0, -magnitude, magnitude)

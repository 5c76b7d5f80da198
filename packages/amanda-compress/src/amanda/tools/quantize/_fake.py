"""Fake quantisation: rounding to a grid of numbers in a floating type, and learned step sizes (LSQ, LSQ+)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import backend_of
from amanda.tools.quantize import _pytorch, _tensorflow
from amanda.tools.quantize._grid import (
    EPSILON,
    FloatGrid,
    Grid,
    Groups,
    Rounding,
    broadcast_channels,
    group_size,
    summed,
)

_KERNELS = {"torch": _pytorch.kernel, "tensorflow": _tensorflow.kernel}


class Scale(NamedTuple):
    """Scale and zero point of a tensor, scalars or (channels,); the grid; axes of the channels, or groups."""

    scale: Any
    zero_point: Any
    grid: Grid
    axes: Sequence[int] = ()
    groups: Groups | None = None


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
    C's round does.  A floating grid gives the number of the type that is nearest to x / scale, times scale:
    bit-equal to torchao's float8 tensors.  kernel: True to use a kernel of the framework if there is one;
    results are bit-equal.
    """
    xp = tensors_of(x)
    kernel_result = _run_kernel(x, scale, zero_point, grid, axes, rounding) if kernel else None
    if kernel_result is not None:
        return kernel_result
    wide, s, z = _broadcast_qparams(x, scale, zero_point, axes)
    if isinstance(grid, FloatGrid):
        return xp.cast(grid.nearest(wide / s) * s, x)
    if rounding == "half_up":
        least, most = (grid.low - z) * s, (grid.high - z) * s
        # A number over a tensor is a product with a reciprocal in torch, which rounds twice.
        inverse = xp.cast(grid.high - grid.low, s) / (most - least)
        shifted = xp.maximum(xp.minimum(wide, most), least) - least
        steps = shifted * inverse if axes else shifted / s
        return xp.cast(xp.floor(steps - xp.floor(-least * inverse + 0.5) + 0.5) * s, x)
    # A product with 1 / scale, as in torch.ao: a quotient would round some ties otherwise.
    integers = _round(wide * (1 / s), rounding) + z
    return xp.cast((xp.minimum(xp.maximum(integers, grid.low), grid.high) - z) * s, x)


def straight_through(x: Any, *qparams: Any) -> Any:
    """Return `fake_quantize(x, *given)`, with `fake_quantize_gradient` as its gradient."""
    kernel_result = _run_kernel(x, *qparams)
    if kernel_result is not None:
        return kernel_result

    def backward(gradient: Any, x: Any) -> tuple[Any]:
        return (fake_quantize_gradient(gradient, x, *qparams),)

    return tensors_of(x).with_gradient(lambda x: fake_quantize(x, *qparams), backward, [x])


def _run_kernel(x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int], rounding: str) -> Any:
    """Return the result of a differentiable kernel of the framework; None without such a kernel."""
    kernel = _KERNELS.get(backend_of(x)) if rounding == "half_even" else None
    return None if kernel is None else kernel(x, scale, zero_point, grid, axes)


@amanda.traceable
def fake_quantize_fixed(x: Any, scales: Mapping[int | None, Scale], rounding: Rounding) -> Any:
    """Quantise a tensor, or tensors of a list, by fixed scales, with traceable operations alone.

    scales: by the index in the list, or under None the scale of `x` itself.
    """

    def fixed(item: int | None, tensor: Any) -> Any:  # without kernels, which need data that graphs lack
        if item not in scales:
            return tensor
        scale, zero_point, grid, axes, groups = scales[item]
        rows = tensor if groups is None else groups.split(tensor)
        quantised = fake_quantize(rows, scale, zero_point, grid, axes, rounding, kernel=False)
        return quantised if groups is None else groups.joined(quantised, tensor.shape)

    return fixed(None, x) if None in scales else [fixed(item, tensor) for item, tensor in enumerate(x)]


def fake_quantize_gradient(
    gradient: Any, x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int] = (),
    rounding: Rounding = "half_even",
) -> Any:  # fmt: skip
    """Return the straight-through gradient: `gradient` where `x` was not clipped, else 0.

    Values that round to an integer of the grid are not clipped, as in PyTorch; with "half_up", values
    between the ends of the grid, as in TensorFlow.  Source: Bengio et al. 2013, sec. 4; Jacob et al. 2018.
    """
    wide, s, z = _broadcast_qparams(x, scale, zero_point, axes)
    if isinstance(grid, FloatGrid):
        passes = tensors_of(wide).absolute(wide / s) <= grid.high
    elif rounding == "half_up":
        passes = (wide >= (grid.low - z) * s) & (wide <= (grid.high - z) * s)
    else:
        integers = _round(wide * (1 / s), rounding) + z
        passes = (integers >= grid.low) & (integers <= grid.high)
    return tensors_of(gradient).where(passes, gradient, gradient * 0)


def _broadcast_qparams(x: Any, scale: Any, zero_point: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return x, scale and zero point in float32 or wider, in shapes that broadcast."""
    wide = tensors_of(x).wide(x)
    return wide, *(
        tensors_of(x).cast(broadcast_channels(parameter, x, axes), wide) for parameter in (scale, zero_point)
    )


def _round(x: Any, rounding: Rounding) -> Any:
    """Round to integers, ties in the direction of `rounding`."""
    xp = tensors_of(x)
    if rounding == "half_even":
        return xp.round(x)
    magnitude = xp.floor(xp.absolute(x) + 0.5)
    return xp.where(x < 0, -magnitude, magnitude)


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

    With v = (x - offset) / scale, inside where low < v < high: x's gradient is `gradient` inside, else 0.
    The scale's is the sum of `gradient` times round(v) - v inside, and times the nearest end of the grid
    outside.  The offset's is the sum of `gradient` outside.
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
    """Return the scale and offset in x's shape, and (x - offset) / scale, in float32 or wider."""
    xp = tensors_of(x)
    wide = xp.wide(x)
    s = xp.cast(broadcast_channels(scale, x, axes), wide)
    if offset is None:
        return s, None, wide / s
    shift = xp.cast(broadcast_channels(offset, x, axes), wide)
    return s, shift, (wide - shift) / s

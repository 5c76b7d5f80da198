"""Fake quantisation: rounding to a grid of numbers, in a floating type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import backend_of
from amanda.tools.quantize import _pytorch, _tensorflow
from amanda.tools.quantize._grid import FloatGrid, Grid, Groups, Rounding, broadcast_channels

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
    bit-equal to torchao's float8 tensors.  kernel: allow a kernel of the framework, which gives the same
    bits.
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
    """Return the result of a kernel that autodiff knows; None if the framework has no kernel for it."""
    kernel = _KERNELS.get(backend_of(x)) if rounding == "half_even" else None
    return None if kernel is None else kernel(x, scale, zero_point, grid, axes)


@amanda.traceable
def fake_quantize_fixed(x: Any, scales: Mapping[int | None, Scale], rounding: Rounding) -> Any:
    """Return a tensor, or tensors of a list, quantised by fixed scales, in tensor code alone.

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
    """Return the straight-through gradient: the given one where `x` was not clipped, else 0.

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
    xp = tensors_of(x)
    if rounding == "half_even":
        return xp.round(x)
    magnitude = xp.floor(xp.absolute(x) + 0.5)
    return xp.where(x < 0, -magnitude, magnitude)

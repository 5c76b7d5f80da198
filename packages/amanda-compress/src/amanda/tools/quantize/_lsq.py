"""LSQ and LSQ+: quantizers whose scale is a parameter, and the gradients of such a scale."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from amanda.tools.kit import tensors_of
from amanda.tools.quantize._fake_quantize import (
    EPSILON,
    Grid,
    as_array,
    broadcast_channels,
    flatten_channels,
    other_axes,
)
from amanda.tools.quantize._quantizer import Quantizer


class LsqQuantizer(Quantizer):
    """A quantizer of LSQ or LSQ+: its scale, and the offset of LSQ+'s activations, are parameters.

    LSQ's activations have an unsigned grid if the first value has no negative number, else a signed grid;
    the state "low" is the least integer of the grid.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.has_scale and "low" in self.state:
            self._shift_grid(int(self.array("low")))

    def _shift_grid(self, low: int) -> None:
        """Move the grid so that the grid begins at `low` and has as many integers as before."""
        self.grid = Grid(low, low + self.grid.high - self.grid.low)

    def _observe(self, x: Any) -> None:
        """Initialise the scale, and the grid of LSQ's activations, from the first value if there is no scale.

        With an offset, LSQ+'s activations, the value is added to a calibration, whose end sets the scale.
        """
        if self.has_scale:
            return
        if "offset" in self.state:
            super()._observe(x)
            return
        x = self.xp.detach(x)
        if "low" in self.state:  # an activation of LSQ, whose first value decides on the grid
            is_negative_somewhere = bool(as_array(x).min(initial=0) < 0)
            levels = self.grid.high - self.grid.low + 1
            # ReLU's outputs would waste half of a signed grid.
            self._shift_grid(-(levels // 2) if is_negative_somewhere else 0)
        initial_scale = lsq_plus_scale if self.options.method == "lsq+" else lsq_scale
        self._assign_state(low=self.grid.low, scale=initial_scale(x, self.grid, self.axes))
        self.has_scale = True

    def _quantise(self, x: Any, frozen: bool) -> Any:
        """Return the quantised value, with gradients for the value, the scale and the offset.

        A first value without a scale sets it.  Learned scales ignore `frozen`.
        """
        if not self.has_scale:
            self._observe(x)
            self.finish_calibration()
        grid, axes = self.grid, self.axes
        # The source counts the features of one example, so that the step does not depend on the batch size.
        example_count = 1 if self.is_weight or not len(x.shape) else max(x.shape[0], 1)
        feature_count = max(group_size(x, axes) // example_count, 1)
        factor = gradient_scale(feature_count, grid)

        def forward(x: Any, scale: Any, offset: Any = None) -> Any:
            return lsq_quantize(x, scale, grid, offset, axes)

        def backward(gradient: Any, x: Any, scale: Any, offset: Any = None) -> Any:
            return lsq_gradients(gradient, x, scale, grid, offset, axes, factor)

        def collect(*gradients: Any) -> None:  # called where no tape reaches the trained state
            """Add the gradients of the trained state to those that `QuantizeTool.gradients` returns."""
            for part, gradient in zip(self.trained, gradients, strict=True):
                # An op that runs twice in a forward pass has two gradients for one scale.
                total = self.collected.get(part)
                self.collected[part] = gradient if total is None else total + gradient

        return self.xp.with_gradient(forward, backward, [x, *map(self._read, self.trained)], collect)


def lsq_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """Return the initial scale of LSQ, 2 mean|x| / sqrt(high), at least EPSILON: a scalar, or (channels,).

    Source: Esser et al. 2020, sec. 2.1.

    Args:
        x: A weight or an activation, of any framework.
        grid: Numbers of the quantised type.
        axes: Axes of the channels in x; () for one scale.
    """
    xp = tensors_of(x)
    mean = sum_by_channel(xp.absolute(xp.wide(x)), axes) / group_size(x, axes)
    return xp.maximum(2 * mean / sqrt(grid.high), EPSILON)


def lsq_plus_scale(x: Any, grid: Grid, axes: Sequence[int] = ()) -> Any:
    """Return the initial scale of LSQ+ for weights: max(|mean - 3 std|, |mean + 3 std|) / 2^(bits - 1).

    At least EPSILON; a scalar, or (channels,).  Source: Bhalgat et al. 2020, eq. 10.

    Args:
        x: A weight, of any framework.
        grid: Numbers of the quantised type.
        axes: Axes of the channels in x; () for one scale.
    """
    xp, count = tensors_of(x), group_size(x, axes)
    wide = xp.wide(x)
    mean = sum_by_channel(wide, axes) / count
    # Two passes: the mean of squares less the square of the mean cancels in float32.
    std = (sum_by_channel((wide - broadcast_channels(mean, x, axes)) ** 2, axes) / count) ** 0.5
    return xp.maximum((xp.absolute(mean) + 3 * std) / (1 << (grid.bits - 1)), EPSILON)


def lsq_quantize(x: Any, scale: Any, grid: Grid, offset: Any = None, axes: Sequence[int] = ()) -> Any:
    """Return round(clip((x - offset) / scale, low, high)) * scale + offset, half to even, in `x`'s type.

    Sources: Esser et al. 2020, eqs. 1 and 2; Bhalgat et al. 2020, eqs. 1 and 2.

    Args:
        x: Of any framework and shape.
        scale: A scalar, or (channels,) with `axes` of the channels in x; without an offset it is LSQ's.
        grid: Numbers of the quantised type.
        offset: Of the shape of the scale; None for LSQ.
        axes: Axes of the channels in x; () for one scale.
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

    Sources: Esser et al. 2020, eqs. 3 and 5; Bhalgat et al. 2020, eqs. 3 to 5.

    Args:
        gradient: Gradient of the result of `lsq_quantize`.
        x: As in `lsq_quantize`.
        scale: As in `lsq_quantize`.
        grid: As in `lsq_quantize`.
        offset: As in `lsq_quantize`.
        axes: As in `lsq_quantize`.
        factor: `gradient_scale`, which multiplies the gradients of scale and offset.
    """
    xp = tensors_of(x)
    wide = xp.wide(gradient)
    _, _, v = _divide_by_scale(x, scale, offset, axes)
    integers = xp.round(xp.minimum(xp.maximum(v, grid.low), grid.high))
    # Strictly inside: at an end of the grid the scale moves as if the value were clipped (Esser et al. 2020,
    # eq. 3).
    inner_gradient = xp.within(wide, v, grid.low, grid.high)
    # Outside the second term is 0, so that the end of the grid remains.
    scale_terms = wide * (integers - xp.within(v, v, grid.low, grid.high))
    scale_gradient = sum_by_channel(scale_terms, axes) * factor
    gradients = [xp.cast(inner_gradient, gradient), xp.cast(scale_gradient, scale)]
    if offset is not None:
        offset_gradient = sum_by_channel(wide - inner_gradient, axes) * factor
        gradients.append(xp.cast(offset_gradient, offset))
    return tuple(gradients)


def gradient_scale(count: int, grid: Grid) -> float:
    """Return 1 / sqrt(count * high), which balances the updates of a scale with those of weights.

    Source: Esser et al. 2020, sec. 2.2.

    Args:
        count: Number of weights, or of features of one example, that share the scale.
        grid: Numbers of the quantised type.
    """
    return 1 / sqrt(count * grid.high)


def _divide_by_scale(x: Any, scale: Any, offset: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the scale and offset, or None, in x's shape, and (x - offset) / scale, in float32 or wider."""
    xp = tensors_of(x)
    wide = xp.wide(x)
    s = xp.cast(broadcast_channels(scale, x, axes), wide)
    if offset is None:
        return s, None, wide / s
    shift = xp.cast(broadcast_channels(offset, x, axes), wide)
    return s, shift, (wide - shift) / s


def group_size(x: Any, axes: Sequence[int]) -> int:
    """Return the number of elements of `x` that share one scale."""
    return prod(x.shape[axis] for axis in other_axes(x, axes))


def sum_by_channel(x: Any, axes: Sequence[int]) -> Any:
    """Return sums over all axes but `axes`, as (channels,); a scalar without axes."""
    return flatten_channels(tensors_of(x).sum(x, other_axes(x, axes)), axes)

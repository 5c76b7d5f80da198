"""Grids of integers; the scale and zero point of a range, and their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rounding = Literal["half_even", "half_up", "half_away"]
"""The direction in which a value half way between two integers is rounded: to even, up, or away from 0."""

EPSILON = 1.1920928955078125e-07
"""The least scale, which is float32's epsilon as in torch.ao."""


class QuantizeError(AmandaError, ValueError):
    """Options, values or files that cannot be used for quantisation."""


@dataclass(frozen=True)
class Grid:
    """The integers low, low + 1, ..., high; symmetric: whether zero is always the zero point."""

    low: int
    high: int
    symmetric: bool = False

    @property
    def bits(self) -> int:
        """Return the number of bits of the integers."""
        return (self.high - self.low).bit_length()

    @classmethod
    def of(cls, bits: int, symmetric: bool) -> Grid:
        """Return the grid of signed integers of so many bits if symmetric, else of unsigned ones.

        Raises QuantizeError for other than 2 to 8 bits.

        >>> Grid.of(4, symmetric=True)
        Grid(low=-8, high=7, symmetric=True)
        """
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise QuantizeError(f"{bits!r} bits; give a number from 2 to 8")
        low = -(1 << (bits - 1)) if symmetric else 0
        return cls(low, low + (1 << bits) - 1, symmetric)


def choose_qparams(least: Any, most: Any, grid: Grid, rounding: Rounding = "half_even") -> tuple[Any, Any]:
    """Return the scale and zero point for a range, after it is widened to include zero.

    least, most: scalars or (channels,) in float32, of any framework.  The scale is
    (most - least) / (high - low), of a symmetric grid 2 max(-least, most) / (high - low), and at least
    EPSILON.  The zero point low - least / scale is rounded as in torch.ao with "half_even", otherwise as in
    TensorFlow: half away from zero.
    Sources: torch.ao.quantization.observer.UniformQuantizationObserverBase of PyTorch 2.13; Nudge in
    fake_quant_ops_functor.h of TensorFlow 2.21; Jacob et al. 2018, sec. 2.1.
    """
    xp = tensors_of(least)
    zero, levels = least - least, xp.cast(grid.high - grid.low, least)
    least, most = xp.minimum(least, zero), xp.maximum(most, zero)
    if grid.symmetric:
        return xp.maximum(xp.maximum(-least, most) / (levels / 2), xp.cast(EPSILON, zero)), zero
    scale = xp.maximum((most - least) / levels, xp.cast(EPSILON, zero))
    if rounding == "half_even":
        zero_point = grid.low - xp.round(least / scale)
    else:
        zero_point = xp.floor(grid.low - least / scale + xp.cast(0.5, zero))
    return scale, xp.minimum(xp.maximum(zero_point, zero + grid.low), zero + grid.high)


def as_array(x: Any) -> NDArray[Any]:
    """Return a tensor as an array of NumPy, in float32 or wider."""
    tensors = tensors_of(x)
    return tensors.to_numpy(tensors.wide(x))


def other_axes(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a tensor that are not among `axes`."""
    return tuple(axis for axis in range(len(x.shape)) if axis not in axes)


def group_size(x: Any, axes: Sequence[int]) -> int:
    """Return the number of elements of `x` that share one scale."""
    return prod(x.shape[axis] for axis in other_axes(x, axes))


def spread(parameter: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return one number per channel, (channels,), in a shape that broadcasts with `x`; scalars unchanged.

    axes: of the channels in `x`; several are taken together, the last varies fastest.
    """
    if not axes:
        return parameter
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(len(x.shape))]
    return tensors_of(parameter).reshape(parameter, shape)


def summed(x: Any, axes: Sequence[int]) -> Any:
    """Return sums over all axes but `axes`, as (channels,); a scalar without axes."""
    return flattened(tensors_of(x).sum(x, other_axes(x, axes)), axes)


def flattened(x: Any, axes: Sequence[int]) -> Any:
    """Return the result of a reduction as (channels,); a scalar without axes."""
    return tensors_of(x).reshape(x, (-1,)) if axes else x

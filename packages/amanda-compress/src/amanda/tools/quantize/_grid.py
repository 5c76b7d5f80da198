"""Grids of numbers; the scale and zero point of a range, and their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from amanda.errors import AmandaError
from amanda.options import Range
from amanda.tools.kit import Unfolding, canonical, restored, tensors_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rounding = Literal["half_even", "half_up", "half_away"]
"""The direction in which a value half way between two integers is rounded: to even, up, or away from 0."""

Float8 = Literal["e4m3", "e5m2"]
"""Floating types of 8 bits: float8_e4m3fn, which has no infinity, and float8_e5m2."""

Bits: TypeAlias = Annotated[int, Range(2, 16)] | Float8
"""A number of bits for integers, or a floating type."""

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
    def of(cls, bits: Bits, symmetric: bool) -> Grid:
        """Return the grid of signed integers of so many bits if symmetric, else of unsigned ones.

        bits: or "e4m3" or "e5m2" for the numbers of a floating type, which always are symmetric.
        Raises QuantizeError for other than 2 to 16 bits.

        >>> Grid.of(4, symmetric=True)
        Grid(low=-8, high=7, symmetric=True)
        """
        if isinstance(bits, str) and bits in get_args(Float8):
            return _FLOAT_GRIDS[bits]
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
            raise QuantizeError(f"{bits!r} bits; give a number from 2 to 16, or {' or '.join(_FLOAT_GRIDS)}")
        low = -(1 << (bits - 1)) if symmetric else 0
        return cls(low, low + (1 << bits) - 1, symmetric)


@dataclass(frozen=True)
class FloatGrid(Grid):
    """The finite numbers of a floating type of 8 bits.

    dtype: PyTorch's and ml_dtypes' name of the type.  mantissa: its bits.  exponent: of the least normal
    number.
    """

    dtype: str = ""
    mantissa: int = 0
    exponent: int = 0

    @property
    def bits(self) -> int:
        """Return the number of bits of the type."""
        return 8

    def nearest(self, x: Any) -> Any:
        """Return the nearest numbers of the grid, half to even; NaN stays."""
        xp = tensors_of(x)
        x = xp.minimum(xp.maximum(x, self.low), self.high)
        magnitude = xp.absolute(x)
        step = magnitude * 0 + 2.0 ** (self.exponent - self.mantissa)
        for exponent in range(self.exponent + 1, self.high.bit_length()):
            step = xp.where(magnitude >= 2.0**exponent, step * 0 + 2.0 ** (exponent - self.mantissa), step)
        return xp.round(x / step) * step


_FLOAT_GRIDS = {
    "e4m3": FloatGrid(-448, 448, True, "float8_e4m3fn", 3, -6),
    "e5m2": FloatGrid(-57344, 57344, True, "float8_e5m2", 2, -14),
}


@dataclass(frozen=True)
class Groups:
    """Groups of weights that share a scale: so many consecutive inputs of each output.

    size: of a group.  layout: axes of the weight, as `weight_layout` of StandardMapping; further axes in
    front of them are of a batch.  Inputs of a convolution are in the order of its channels and its window.
    are_outputs: a group is all that an output has, where no axis of the weight counts the outputs.
    """

    size: int
    layout: str
    are_outputs: bool = False

    @classmethod
    def of_outputs(cls, shape: Sequence[int], layout: str) -> Groups:
        """Return a group for each output of a weight of this shape."""
        way = Unfolding.of(shape, layout)
        return cls(prod(way.canonical[way.outputs :]), layout, are_outputs=True)

    def fit(self, shape: Sequence[int]) -> bool:
        """Return True if the inputs of a weight of this shape are a multiple of the size."""
        way = Unfolding.of(shape, self.layout)
        return prod(way.canonical[way.outputs :]) % self.size == 0

    def split(self, x: Any) -> Any:
        """Return a weight as (groups, size), output by output."""
        return tensors_of(x).reshape(canonical(x, self.layout), (-1, self.size))

    def joined(self, rows: Any, shape: Sequence[int]) -> Any:
        """Return what `split` made of a weight of this shape in the weight's own form."""
        whole = tensors_of(rows).reshape(rows, Unfolding.of(shape, self.layout).canonical)
        return restored(whole, self.layout, shape)


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


def broadcast_channels(parameter: Any, x: Any, axes: Sequence[int]) -> Any:
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

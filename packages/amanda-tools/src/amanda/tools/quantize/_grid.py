"""The integers that a tensor is quantised to, and the scale and zero point that a range asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of

Rounding = Literal["half_even", "half_up", "half_away"]
"""The direction in which a value half way between two integers is rounded: to even, up, or away from 0."""

EPSILON = 1.1920928955078125e-07
"""The least scale, which is float32's epsilon as in torch.ao."""


class QuantizeError(AmandaError, ValueError):
    """Options, values or files with which nothing can be quantised."""


@dataclass(frozen=True)
class Grid:
    """The integers low, low + 1, ..., high.

    symmetric: around zero, which is the zero point.
    """

    low: int
    high: int
    symmetric: bool = False

    @property
    def bits(self) -> int:
        """Return how many bits the integers take."""
        return (self.high - self.low).bit_length()

    @classmethod
    def of(cls, bits: int, symmetric: bool) -> Grid:
        """Return signed integers of so many bits where symmetric, unsigned ones otherwise.

        Raises QuantizeError for other than 2 to 8 bits.

        >>> Grid.of(4, symmetric=True)
        Grid(low=-8, high=7, symmetric=True)
        """
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise QuantizeError(f"{bits!r} bits; give a number from 2 to 8")
        low = -(1 << (bits - 1)) if symmetric else 0
        return cls(low, low + (1 << bits) - 1, symmetric)


def choose_qparams(least: Any, most: Any, grid: Grid, rounding: Rounding = "half_even") -> tuple[Any, Any]:
    """Return the scale and zero point that cover a range, which is widened to include zero.

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

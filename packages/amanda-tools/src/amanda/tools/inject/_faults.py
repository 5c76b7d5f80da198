"""What becomes of the elements that a fault hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from amanda.errors import AmandaError

Kind = Literal["bit_flip", "stuck_at_0", "stuck_at_1", "value", "zero", "gaussian", "uniform", "relative"]
Field = Literal["any", "sign", "exponent", "mantissa"]
OF_BITS = ("bit_flip", "stuck_at_0", "stuck_at_1")
OF_NOISE = ("gaussian", "uniform", "relative")


class InjectError(AmandaError, ValueError):
    """An option of the tool, or of a campaign, that makes no sense."""


def check_known(option: str, given: Any, kind: Any) -> None:
    """Raise InjectError for what is not one of the words of a Literal."""
    if given not in get_args(kind):
        raise InjectError(f"{option} is {given!r}; it is one of {', '.join(get_args(kind))}")


def check_least(option: str, given: Any, least: float) -> None:
    """Raise InjectError for a number below the least one that makes sense; None is none."""
    if given is not None and given < least:
        raise InjectError(f"{option} is {given}; it is at least {least}")


@dataclass(frozen=True)
class Fault:
    """One kind of fault and its parameters.

    bits: positions that may be hit, None for all.  field: which part of a number they are in.
    flips: bits that are hit in each element.  value: what "value" writes.
    scale: standard deviation of "gaussian" and of the factor of "relative", bound of "uniform".
    Raises InjectError for those that do not go together.
    """

    kind: Kind = "bit_flip"
    bits: Sequence[int] | None = None
    field: Field = "any"
    flips: int = 1
    value: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_known("fault", self.kind, Kind)
        check_known("field", self.field, Field)
        check_least("flips", self.flips, 1)
        if self.bits is not None and (not self.bits or min(self.bits) < 0):
            raise InjectError(f"bits is {self.bits}; give positions, 0 for the least significant bit")
        if self.kind not in OF_BITS and (self.bits is not None or self.field != "any"):
            raise InjectError(
                f"bits and field are for faults of bits ({', '.join(OF_BITS)}), not for {self.kind}"
            )

    def fits(self, dtype: np.dtype[Any]) -> bool:
        """Return True if elements of a type can have it."""
        if self.kind in OF_BITS:
            return len(self._bits_in(dtype)) >= self.flips
        return dtype != np.bool_ or self.kind not in OF_NOISE

    def applied(
        self, old: NDArray[Any], random: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """Return elements (n) with the fault, and the bits (n, flips) that were hit."""
        if self.kind not in OF_BITS:
            return _rounded(self._numbers(old, random), old.dtype), None
        allowed = np.array(self._bits_in(old.dtype))
        order = random.random((len(old), len(allowed))).argsort(axis=1, kind="stable")
        bits = allowed[np.sort(order[:, : self.flips], axis=1)]
        raw = old.reshape(-1, 1).view(np.uint8)
        masks = np.zeros_like(raw)
        for column in bits.T:
            masks[np.arange(len(raw)), column // 8] |= (1 << (column % 8)).astype(np.uint8)
        if self.kind == "bit_flip":
            hit = raw ^ masks
        else:
            hit = raw & ~masks if self.kind == "stuck_at_0" else raw | masks
        return hit.view(old.dtype)[:, 0], bits

    def _bits_in(self, dtype: np.dtype[Any]) -> list[int]:
        field = bits_of(dtype, self.field)
        return field if self.bits is None else [bit for bit in field if bit in self.bits]

    def _numbers(self, old: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
        if self.kind in ("value", "zero"):
            return np.full(len(old), self.value if self.kind == "value" else 0.0)
        if self.kind == "uniform":
            noise = random.uniform(-self.scale, self.scale, (len(old), 2))
        else:
            noise = random.normal(0.0, self.scale, (len(old), 2))
        numbers = as_numbers(old)
        drawn = noise[:, 0] + 1j * noise[:, 1] if np.iscomplexobj(numbers) else noise[:, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(numbers * (1 + drawn) if self.kind == "relative" else numbers + drawn)


def as_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a type of NumPy's own: in float64 where it is in one of ml_dtypes."""
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float64)


def bits_of(dtype: np.dtype[Any], field: Field) -> list[int]:
    """Return the positions of the bits of a field, 0 the least significant.

    A truth value has bit 0.  The real part of a complex number has the lower half of the bits.
    An integer's bits other than the sign are its mantissa.
    """
    if dtype == np.bool_:
        return [0] if field in ("any", "mantissa") else []
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        one = bits_of(part, field)
        return one + [bit + 8 * part.itemsize for bit in one]
    try:
        exact: Any = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        number: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        exponent, mantissa, size = number.nexp, number.nmant, number.bits
    else:
        exponent, mantissa, size = 0, exact.bits - (exact.min < 0), exact.bits
    ranges = {
        "any": range(size),
        "mantissa": range(mantissa),
        "exponent": range(mantissa, mantissa + exponent),
        "sign": range(mantissa + exponent, size),
    }
    return list(ranges[field])


def _rounded(numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers in a type: rounded, for integers also clipped to what the type holds.

    Raises ValueError for NaN where an integer is wanted.
    """
    if not np.issubdtype(dtype, np.integer):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(numbers).astype(dtype)
    if np.isnan(numbers).any():
        raise ValueError(f"NaN cannot be written into elements of type {dtype}")
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    infinite = {np.inf: most, -np.inf: least}
    return np.array(
        [infinite[one] if one in infinite else min(max(round(one), least), most) for one in numbers.tolist()],
        dtype,
    )

"""Number formats by the names of element types: which bits mean what, and numbers from and to bytes."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from amanda.tools.kit import Tensors, tensors_of
from amanda.tools.libraries import ml_dtypes
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BitField = Literal["any", "sign", "exponent", "mantissa"]
"""A part of a number in memory."""

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")
_FLOATS = frozenset({"float16", "float32", "float64"})
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@cache
def bits_of(dtype: str | None, field: BitField = "any") -> tuple[int, ...]:
    """Return the positions of the bits of a field, 0 the least significant; none of an unknown type.

    A truth value has bit 0.  The real part of a complex number has the lower half of the bits.
    An integer's bits other than the sign are its mantissa.

    >>> bits_of("float16", "exponent")
    (10, 11, 12, 13, 14)
    """
    if dtype in _COMPLEX:
        part, half = bits_of(_COMPLEX[dtype], field), len(bits_of(_COMPLEX[dtype]))
        return (*part, *(bit + half for bit in part))
    mantissa, exponent, sign = _sizes(dtype or "")
    unsigned, size = mantissa + exponent, mantissa + exponent + sign
    fields = {"mantissa": (0, mantissa), "exponent": (mantissa, unsigned), "sign": (unsigned, size)}
    return tuple(range(*fields.get(field, (0, size))))


def _is_lacked(dtype: str) -> bool:
    """Return True for a type of floating numbers that ml_dtypes has and NumPy lacks."""
    return dtype == "bfloat16" or (dtype.startswith("float8_") and hasattr(ml_dtypes, dtype))


def _is_float(dtype: str) -> bool:
    return dtype in _FLOATS or _is_lacked(dtype)


def _sizes(dtype: str) -> tuple[int, int, int]:
    """Return how many bits mantissa, exponent and sign have."""
    if _is_float(dtype):
        known = ml_dtypes.finfo(Tensors.numpy_type(dtype))  # type: ignore[no-untyped-call]
        return known.nmant, known.nexp, known.bits - known.nmant - known.nexp
    if integer := _INTEGER.fullmatch(dtype):
        sign = 0 if integer[1] else 1
        return int(integer[2]) - sign, 0, sign
    return int(dtype == "bool"), 0, 0


def from_bytes(rows: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return the numbers that rows of bytes stand for, floats in float64."""
    if dtype == "complex32":
        return rows.view(np.float16).astype(np.float32).view(np.complex64)[:, 0]
    found: NDArray[Any] = rows.view(Tensors.numpy_type(dtype))[:, 0]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return found.astype(np.float64) if _is_float(dtype) else found


def to_bytes(numbers: NDArray[Any], dtype: str, like: Any) -> NDArray[np.uint8]:
    """Return a row of bytes for each number: rounded, in integers also clipped to what the type holds.

    like: a tensor of the type, whose library rounds where NumPy has no such type.
    Raises ValueError for NaN where an integer is wanted.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if _is_lacked(dtype) or dtype == "complex32":
            tensors = tensors_of(like)
            return tensors.bytes_at(tensors.cast(numbers, like), np.arange(len(numbers)))
        made = _integers(numbers, dtype) if _INTEGER.fullmatch(dtype) else numbers.astype(dtype)
    return made.reshape(-1, 1).view(np.uint8)


def _integers(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    if np.isnan(numbers).any():
        raise ValueError(f"NaN cannot be written into elements of type {dtype}")
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    clipped = [least if one < least else most if one > most else round(one) for one in numbers.tolist()]
    return np.array(clipped, dtype)

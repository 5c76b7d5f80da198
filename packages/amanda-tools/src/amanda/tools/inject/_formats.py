"""Number formats by the names of element types: how many bits, and which mean what."""

from __future__ import annotations

import re
from typing import Literal

Field = Literal["any", "sign", "exponent", "mantissa"]

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")
_MINIFLOAT = re.compile(r"float8_e(\d)m(\d)\w*")
_FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def is_known(dtype: str | None) -> bool:
    """Whether elements of this type have bits that faults can be put into."""
    return dtype is not None and (
        dtype == "bool"
        or dtype in _FLOATS
        or dtype in _COMPLEX
        or bool(_INTEGER.fullmatch(dtype) or _MINIFLOAT.fullmatch(dtype))
    )


def is_number(dtype: str) -> bool:
    """Whether noise can be added: to everything but truth values."""
    return dtype != "bool"


def width(dtype: str) -> int:
    """Bytes of an element."""
    return (max(bits_of(dtype, "any")) + 8) // 8


def bits_of(dtype: str, field: Field) -> list[int]:
    """Positions of the bits of a field, 0 the least significant.

    A truth value has bit 0.  The real part of a complex number has the lower half of the bits.
    An integer's bits other than the sign are its mantissa.
    """
    if dtype == "bool":
        return [0] if field in ("any", "mantissa") else []
    if dtype in _COMPLEX:
        part = _COMPLEX[dtype]
        half = 8 * width(part)
        one = bits_of(part, field)
        return one + [bit + half for bit in one]
    if integer := _INTEGER.fullmatch(dtype):
        exponent, mantissa, signed = 0, int(integer[2]) - (not integer[1]), not integer[1]
    else:
        exponent, mantissa = _floating(dtype)
        signed = exponent + mantissa < 8 or not _MINIFLOAT.fullmatch(dtype)
    size = mantissa + exponent + signed
    ranges = {
        "any": range(size),
        "mantissa": range(mantissa),
        "exponent": range(mantissa, mantissa + exponent),
        "sign": range(mantissa + exponent, size),
    }
    return list(ranges[field])


def _floating(dtype: str) -> tuple[int, int]:
    if mini := _MINIFLOAT.fullmatch(dtype):
        return int(mini[1]), int(mini[2])
    return _FLOATS[dtype]

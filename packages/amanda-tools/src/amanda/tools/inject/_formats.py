"""Number formats by the names of element types: the bits of each field, and bytes from and to numbers."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from amanda.tools.kit import tensors_of

Field = Literal["any", "sign", "exponent", "mantissa"]
Bytes = NDArray[np.uint8]
"""Bytes of elements: a row (width) for each."""

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")
_NUMPYS = frozenset({"float16", "float32", "float64"})
_FLOATS = {*_NUMPYS, "bfloat16", *(name for name in dir(ml_dtypes) if name.startswith("float8_"))}
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@cache
def bits_of(dtype: str | None, field: Field) -> tuple[int, ...]:
    """Return the positions of the bits of a field, 0 the least significant; none of an unknown type.

    A truth value has bit 0.  The real part of a complex number has the lower half of the bits.
    An integer's bits other than the sign are its mantissa.
    """
    if dtype in _COMPLEX:
        part = bits_of(_COMPLEX[dtype], field)
        half = len(bits_of(_COMPLEX[dtype], "any"))
        return (*part, *(bit + half for bit in part))
    mantissa, exponent, sign = _sizes(dtype or "")
    unsigned, size = mantissa + exponent, mantissa + exponent + sign
    fields = {
        "any": (0, size),
        "mantissa": (0, mantissa),
        "exponent": (mantissa, unsigned),
        "sign": (unsigned, size),
    }
    return tuple(range(*fields[field]))


def _sizes(dtype: str) -> tuple[int, int, int]:
    """Return how many bits mantissa, exponent and sign have."""
    if dtype in _FLOATS:
        known = ml_dtypes.finfo(_type(dtype))
        return known.nmant, known.nexp, known.bits - known.nmant - known.nexp
    if integer := _INTEGER.fullmatch(dtype):
        sign = 0 if integer[1] else 1
        return int(integer[2]) - sign, 0, sign
    return int(dtype == "bool"), 0, 0


def numbers(raw: Bytes, dtype: str) -> NDArray[Any]:
    """Return the numbers that bytes stand for, floats in float64."""
    if dtype == "complex32":
        return raw.view(np.float16).astype(np.float32).view(np.complex64)[:, 0]
    found: NDArray[Any] = raw.view(_type(dtype))[:, 0]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return found.astype(np.float64) if dtype in _FLOATS else found


def encoded(given: NDArray[Any], dtype: str, like: Any) -> Bytes:
    """Return the bytes of numbers: rounded, in integers also clipped to what the type holds.

    like: a tensor of the type, whose library rounds where NumPy has no such type.
    Raises ValueError for NaN where an integer is wanted.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if _INTEGER.fullmatch(dtype):
            made = _integers(given, np.iinfo(dtype))
        elif dtype == "complex32" or (dtype in _FLOATS and dtype not in _NUMPYS):
            tensors = tensors_of(like)
            return tensors.bytes_at(tensors.cast(given, like), np.arange(len(given)))
        else:
            made = given.astype(dtype)
    return made.reshape(-1, 1).view(np.uint8)


def _integers(given: NDArray[Any], limits: Any) -> NDArray[Any]:
    if np.isnan(given).any():
        raise ValueError(f"NaN cannot be written into elements of type {limits.dtype}")
    least, most = int(limits.min), int(limits.max)
    clipped = [least if one < least else most if one > most else round(one) for one in given.tolist()]
    return np.array(clipped, limits.dtype)


def _type(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))

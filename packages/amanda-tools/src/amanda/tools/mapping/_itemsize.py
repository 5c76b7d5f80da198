"""Sizes of elements."""

from __future__ import annotations

import re
from functools import cache

_BITS = re.compile(r"[a-z]+(\d+)")


@cache
def itemsize(dtype: str | None) -> int | None:
    """Bytes of an element of a type, by the name that `context["dtype"]` gives; None of another name.

    >>> itemsize("bfloat16"), itemsize("complex64"), itemsize("float8_e4m3fn"), itemsize("string")
    (2, 8, 1, None)
    """
    if dtype == "bool":
        return 1
    bits = _BITS.match(dtype or "")
    return (int(bits[1]) + 7) // 8 if bits else None

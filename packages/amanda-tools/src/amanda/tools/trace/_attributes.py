"""Arguments of ops in a form that goes into any file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LISTED = 64
_TEXT = 200


def plain(value: Any, depth: int = 0) -> Any:
    """Return numbers, text, None, and lists and objects of these as they are, of others a short text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, (list, tuple, Mapping)) and depth <= 4 and (len(value) <= _LISTED or not depth):
        if isinstance(value, Mapping):
            return {str(name): plain(one, depth + 1) for name, one in value.items()}
        return [plain(one, depth + 1) for one in value]
    text = value.decode(errors="replace") if isinstance(value, bytes) else _text(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _text(value: Any) -> str:
    if hasattr(type(value), "as_numpy_dtype"):  # an element type with a long text
        return str(value.name)
    if isinstance(value, type):
        return value.__qualname__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if hasattr(type(value), "nbytes"):  # a storage, whose text has all its elements
        return type(value).__qualname__
    return str(value)

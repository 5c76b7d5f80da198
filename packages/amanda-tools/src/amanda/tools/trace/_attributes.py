"""Arguments of ops in a form that goes into any file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LISTED = 64
_TEXT = 200


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, text, booleans, None, and lists and objects of these; of others their text, shortened."""
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, bytes):
        return _shortened(value.decode(errors="replace"))
    if isinstance(value, str):
        return _shortened(value)
    if isinstance(value, (list, tuple)) and depth < 4 and len(value) <= _LISTED:
        return [_plain(one, depth + 1) for one in value]
    if isinstance(value, Mapping) and depth < 4 and len(value) <= _LISTED:
        return {str(name): _plain(one, depth + 1) for name, one in value.items()}
    if isinstance(value, slice):
        return str(value)
    if hasattr(type(value), "as_numpy_dtype"):  # TensorFlow's element types have long texts
        return str(value.name)
    if isinstance(value, type):
        return value.__qualname__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if hasattr(type(value), "nbytes"):  # a storage, whose text has all its elements
        return type(value).__qualname__
    return _shortened(str(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"

"""Whose tensor a value is."""

from __future__ import annotations

from functools import cache
from typing import Any

from autoray import infer_backend

_KNOWN = ("torch", "tensorflow")


def backend_of(value: Any) -> str:
    """autoray's name for what computes with a value; a subclass of a framework's tensors is that one's."""
    return _of_class(value.__class__) or str(infer_backend(value))


@cache
def _of_class(kind: Any) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((root for root in roots if root in _KNOWN), None)

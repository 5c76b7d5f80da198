"""The framework of a tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

from amanda.tools.libraries import infer_backend, register_backend

_KNOWN = ("torch", "tensorflow")


def backend_of(value: Any) -> str:
    """Return autoray's name of the library that computes with a value.

    A subclass of a framework's tensors is that framework's, and autoray's functions take it from then on.
    """
    return _of_class(value.__class__) or str(infer_backend(value))


@cache
def _of_class(kind: Any) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    found = next((root for root in roots if root in _KNOWN), None)
    if found is not None:
        register_backend(kind, found)
    return found

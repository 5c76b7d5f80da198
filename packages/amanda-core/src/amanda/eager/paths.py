"""Paths of modules in the modules that call them, by which ids of ops and reports name a place in a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from amanda.interceptor.opid import digest


def path_of_call(subjects: Sequence[Any], path_within: Callable[[Any, Any], str]) -> str:
    """Return the path from the first of the modules whose calls are under way to the last: "layer1.conv".

    subjects: the outermost first.  path_within: returns the path of the second module in the first.
    """
    parts = [path_within(outer, inner) for outer, inner in pairwise(subjects) if inner is not outer]
    return ".".join(part for part in parts if part)


def type_as_path(module: Any) -> str:
    """Return the path of a module that its caller does not hold: its type, "(Dense)"."""
    return f"({type(module).__name__})"


def place_by_path(path_within: Callable[[Any, Any], str]) -> Callable[[Any, Any], tuple[int, bool]]:
    """Return the `place` of `Attributes.enclose` for modules that are told apart by their paths.

    path_within: returns the path of the second module in the first, or `type_as_path` of the second.
    """

    def place(outer: Any, inner: Any) -> tuple[int, bool]:
        """Return the hash of a module's path in its caller, and False if the caller does not hold it."""
        path = path_within(outer, inner)
        return digest(path), not path.startswith("(")

    return place

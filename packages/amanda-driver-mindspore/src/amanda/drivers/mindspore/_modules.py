"""Calls of cells as regions of the program, and the path of a cell in its network."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from amanda.backend import Attributes, digest
from mindspore import nn

_METHODS = ("__call__", "_complex_call", "_run_construct")


def enclose_cells(attributes: Attributes) -> None:
    """Make each call of a cell a region, to which the ops in it belong."""
    attributes.enclose(nn.Cell, _hash_path, _METHODS)


def cell_path(subjects: Sequence[Any]) -> str:
    """Return the path from the first cell to the last, as in `cells_and_names`: "layer1.0.conv1"."""
    parts = [_path_within(outer, inner) for outer, inner in pairwise(subjects) if inner is not outer]
    return ".".join(part for part in parts if part)


def _path_within(outer: nn.Cell, inner: nn.Cell) -> str:
    """Return the path of a cell in another cell, or "(Type)" if it is not in that cell."""
    for name, cell in outer.cells_and_names():
        if cell is inner:
            return str(name)
    return f"({type(inner).__name__})"


def _hash_path(outer: Any, inner: Any) -> tuple[int, bool]:
    """Return the hash of a cell's path in the calling cell, and False for a cell that is not in it."""
    name = _path_within(outer, inner)
    return digest(name), not name.startswith("(")

"""Calls of cells: regions of the program, and the path of a cell in its network."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from amanda.backend import Attributes, digest
from mindspore import nn

_METHODS = ("__call__", "_complex_call", "_run_construct")


def enclose_cells(attributes: Attributes) -> None:
    """Make each call of a cell a region: the ops in it belong to that cell."""
    attributes.enclose(nn.Cell, _place_within, _METHODS)


def cell_path(subjects: Sequence[Any]) -> str:
    """Path of the last cell from the first, as `cells_and_names` spells it: "layer1.0.conv1"."""
    parts = [_name_within(outer, inner) for outer, inner in pairwise(subjects) if inner is not outer]
    return ".".join(part for part in parts if part)


def _name_within(outer: nn.Cell, inner: nn.Cell) -> str:
    for name, cell in outer.cells_and_names():
        if cell is inner:
            return str(name)
    return f"({type(inner).__name__})"


def _place_within(outer: Any, inner: Any) -> tuple[int, bool]:
    """Hash of a cell's path in the one that calls it; one made for this call lies there by its type."""
    name = _name_within(outer, inner)
    return digest(name), not name.startswith("(")

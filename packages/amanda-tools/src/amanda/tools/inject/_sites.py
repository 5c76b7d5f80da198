"""Where faults can be put: the executions of ops, and the tensors among the values of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from amanda.tools.inject._elements import Elements
from amanda.tools.inject._formats import is_known
from amanda.tools.inject._options import Options


class Site(NamedTuple):
    """One execution of one op in which faults can be put; elements: how many its tensors have."""

    op: int
    execution: int
    elements: int
    phase: str
    type: str
    module: str
    source: str


@dataclass(frozen=True)
class Place:
    """One op that is selected, and how its tensors are read."""

    op: int
    phase: str
    type: str
    module: str
    source: str
    elements: Elements
    dtype: Any


class Tensor(NamedTuple):
    """A tensor among the values that a routine is given: at a position, or an item of a list there."""

    value: Any
    dtype: str
    shape: tuple[int, ...]
    name: str
    position: int
    item: int | None

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


Fits = Callable[[int, Any], bool]
"""Whether a fault may be put in the value at a position."""


def always(position: int, value: Any) -> bool:
    """Any value fits."""
    return True


def tensors_of(
    values: Sequence[tuple[int, Any]], place: Place, options: Options, fits: Fits
) -> Iterator[Tensor]:
    """Those among values, each with its position, that can have the fault."""
    for position, (index, value) in enumerate(values):
        if options.index not in (None, index) or not fits(index, value):
            continue
        listed = isinstance(value, (list, tuple))
        for item, one in enumerate(value if listed else (value,)):
            shape = place.elements.extents(one)
            dtype = None if shape is None else place.dtype(one)
            if shape is not None and dtype is not None and is_known(dtype) and options.fault.fits(dtype):
                name = f"{options.target}[{index}]" + (f"[{item}]" if listed else "")
                yield Tensor(one, dtype, shape, name, position, item if listed else None)

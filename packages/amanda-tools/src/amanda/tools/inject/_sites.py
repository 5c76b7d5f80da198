"""Sites of faults: the executions of ops, and the tensors among the values of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from amanda.tools.inject._faults import Fault
from amanda.tools.kit import tensors_of


class Site(NamedTuple):
    """One execution of one op in which faults can be put; elements: how many its tensors have."""

    op: int
    execution: int
    elements: int
    phase: str
    type: str
    module: str
    source: str


@dataclass(eq=False)
class SelectedOp:
    """One op that is selected, forward or backward.

    told: its phase, type, module and source.  number: in the order of analysis.  dtype: gives the name of
    a tensor's element type.
    """

    op: int
    told: tuple[str, str, str, str]
    number: int
    dtype: Any
    executions: int = 0


class Tensor(NamedTuple):
    """A tensor among the values that a routine is given: at a position, or an item of a list there."""

    value: Any
    dtype: str
    name: str
    position: int
    item: int | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.value.shape)


def tensors_in(value: Any, name: str, position: int, fault: Fault, place: SelectedOp) -> Iterator[Tensor]:
    """Yield the dense tensors that a value is, or that are in a list, whose elements can have the fault."""
    listed = isinstance(value, (list, tuple))
    for item, one in enumerate(value if listed else (value,)):
        dtype = place.dtype(one)
        if dtype is not None and fault.fits(dtype) and tensors_of(one).is_dense(one):
            yield Tensor(one, dtype, name + f"[{item}]" * listed, position, item if listed else None)

"""Sites of faults: executions of ops, and the tensors of an execution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.inject._faults import Fault
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Site(NamedTuple):
    """One execution of one op that can have faults; elements: the number in its tensors."""

    op: int
    execution: int
    elements: int
    phase: str
    type: str
    module: str
    source: str


@dataclass(eq=False)
class SelectedOp:
    """One selected op, forward or backward.

    told: its phase, type, module and source.  number: in the order of analysis.  dtype: function that returns
    the name of a tensor's element type.  left: sentences on tensors that cannot be read.
    """

    op: int
    told: tuple[str, str, str, str]
    number: int
    dtype: Any
    executions: int = 0
    left: dict[str, None] = field(default_factory=dict)


class Tensor(NamedTuple):
    """A tensor among the values of a routine: at a position, or an item of a list there."""

    value: Any
    dtype: str
    name: str
    position: int
    item: int | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.value.shape)

    def units(self, axis: int | None) -> int:
        """Return the number of slices along an axis, or of elements for None."""
        return self.size if axis is None else int(self.value.shape[axis])

    def positions(self, units: NDArray[np.int64], axis: int | None) -> NDArray[np.int64]:
        """Return the positions of elements in the flattened tensor, by those before, in and after `units`."""
        if axis is None:
            return units[None, :, None]
        extents = self.value.shape
        axis %= len(extents)
        before, after = np.arange(prod(extents[:axis])), np.arange(prod(extents[axis + 1 :]))
        return np.asarray((before[:, None, None] * extents[axis] + units[:, None]) * len(after) + after)


def tensors_in(value: Any, name: str, position: int, fault: Fault, place: SelectedOp) -> Iterator[Tensor]:
    """Yield the dense tensors in a value, or in a list, whose element type can have the fault."""
    listed = isinstance(value, (list, tuple))
    for item, one in enumerate(value if listed else (value,)):
        dtype = place.dtype(one)
        reason = None if dtype is None else tensors_of(one).unread(one)
        if reason is not None:
            place.left[
                f"{name} of {place.told[1]} of {place.told[2] or place.told[3]} is left: {reason}."
            ] = None
        elif dtype is not None and tensors_of(one).is_dense(one) and fault.fits(dtype, one.shape):
            yield Tensor(one, dtype, name + f"[{item}]" * listed, position, item if listed else None)

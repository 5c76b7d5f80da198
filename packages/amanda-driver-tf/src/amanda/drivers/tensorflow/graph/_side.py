"""The values at one side of an operation while routines are put there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_OPAQUE = (tf.resource, tf.variant)


class Side:
    """Inputs or outputs of an operation: where each value is read at the moment.

    refs: how each flat tensor is written as an input.  tensors: the symbols.
    sizes: for each value its length where it is a list; None for a single tensor.
    unread: positions of references, which may stand for a variable that has no value: routines get None.
    """

    def __init__(
        self,
        refs: Sequence[str],
        tensors: Sequence[Any],
        sizes: Sequence[int | None],
        unread: Sequence[bool] = (),
    ) -> None:
        self.refs = list(refs)
        self.before = list(refs)
        self.tensors = list(tensors)
        total = sum(1 if size is None else size for size in sizes)
        self.sizes = list(sizes) if total == len(tensors) else [None] * len(tensors)
        self.unread = {i for i, one in enumerate(unread) if one}
        self._firsts: list[int] = []
        first = 0
        for size in self.sizes:
            self._firsts.append(first)
            first += 1 if size is None else size

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.sizes)

    def selected(self, selections: Sequence[Sequence[int] | None]) -> list[int]:
        """The positions of the values that routines with these selections need."""
        if any(select is None for select in selections):
            return [i for i in range(self.count) if i not in self.unread]
        chosen = {position % self.count for select in selections for position in select or ()
                  if -self.count <= position < self.count}  # fmt: skip
        return sorted(chosen - self.unread)

    def flat(self, positions: Sequence[int]) -> list[int]:
        """The flat positions of values."""
        return [i for position in positions for i in self._range(position)]

    def _range(self, position: int) -> range:
        size, first = self.sizes[position], self._firsts[position]
        return range(first, first + (1 if size is None else size))

    def changeable(self, positions: Sequence[int]) -> list[int]:
        """Those values whose tensors a routine may give anew."""
        return [
            position
            for position in positions
            if all(is_plain(self.tensors[i]) for i in self.flat([position]))
        ]

    def changed(self) -> list[int]:
        """Flat positions that are read elsewhere than at first."""
        return [i for i, (old, new) in enumerate(zip(self.before, self.refs, strict=True)) if old != new]


def is_plain(tensor: Any) -> bool:
    """Whether a tensor's value can be given by Python: no handle, no reference."""
    return tensor.dtype not in _OPAQUE and not tensor.dtype._is_ref_dtype


def enum(tensor: Any) -> int:
    """A tensor's type as protocol buffers have it."""
    number: int = tensor.dtype.base_dtype.as_datatype_enum
    return number


def nbytes(tensor: Any) -> int:
    """How much memory a tensor takes, where dimensions that are not known count as 32."""
    if tensor.shape.rank is None:
        return 1 << 20
    total = max(tensor.dtype.size, 1)
    for size in tensor.shape.as_list():
        total *= 32 if size is None else size
    return int(total)

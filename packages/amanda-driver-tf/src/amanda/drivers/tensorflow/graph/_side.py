"""The values at one side of an operation, and facts of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Side

_OPAQUE = (tf.resource, tf.variant)


class OpSide(Side):
    """The values that an operation is given (`ahead`), or that it gives.

    layout: name and size of each value; by default each tensor is one.
    references: of each value whether it is a reference, to a variable that may have no value.
    made: how each value is read that the operation itself gives, or what replaces it.
    """

    def __init__(
        self,
        op: tf.Operation,
        ahead: bool,
        refs: Sequence[str],
        tensors: Sequence[Any],
        layout: Sequence[tuple[str, int | None]] = (),
        references: Sequence[bool] = (),
    ) -> None:
        sizes = [size for _, size in layout]
        lengths = [1 if size is None else size for size in sizes]
        if sum(lengths) != len(tensors):
            sizes, references = [None] * len(tensors), ()
        flags = [flag for flag, length in zip(references, lengths, strict=False) for _ in range(length)]
        super().__init__(refs, tensors, sizes, [i for i, flag in enumerate(flags) if flag])
        self.op = op
        self.ahead = ahead
        self.made = self.before


def at(side: Side) -> OpSide:
    """Return a side as one of an operation."""
    assert isinstance(side, OpSide)
    return side


def is_plain(tensor: Any) -> bool:
    """Return True if a tensor's value can be given by Python: no handle, no reference."""
    return tensor.dtype not in _OPAQUE and not tensor.dtype._is_ref_dtype


def enum(tensor: Any) -> int:
    """A tensor's type as protocol buffers have it."""
    number: int = tensor.dtype.base_dtype.as_datatype_enum
    return number


def nbytes(tensor: Any) -> int:
    """Return how much memory a tensor takes, where dimensions that are not known count as 32."""
    if tensor.shape.rank is None:
        return 1 << 20
    total = max(tensor.dtype.size, 1)
    for size in tensor.shape.as_list():
        total *= 32 if size is None else size
    return int(total)

"""The values at one side of an operation, and facts of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Side

_OPAQUE = (tf.resource, tf.variant)


class OpSide(Side):
    """The inputs of an operation (`ahead`), or its outputs.

    layout: name and length of each value; by default each tensor is a value.
    references: True for each value that is a reference to a variable, which may have no value.
    op_refs: refs of the outputs of the operation, or of its replacement.
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
        self.op_refs = self.before


def op_side(side: Side) -> OpSide:
    """Return a side as an OpSide, for the type checker."""
    assert isinstance(side, OpSide)
    return side


def is_plain(tensor: Any) -> bool:
    """Return True if Python can return a tensor: it is no handle and no reference."""
    return tensor.dtype not in _OPAQUE and not tensor.dtype._is_ref_dtype


def dtype_enum(tensor: Any) -> int:
    """Return the enum of a tensor's dtype in protocol buffers."""
    number: int = tensor.dtype.base_dtype.as_datatype_enum
    return number


def estimated_nbytes(tensor: Any) -> int:
    """Return the memory of a tensor, with 32 for each unknown dimension."""
    if tensor.shape.rank is None:
        return 1 << 20
    total = max(tensor.dtype.size, 1)
    for size in tensor.shape.as_list():
        total *= 32 if size is None else size
    return int(total)

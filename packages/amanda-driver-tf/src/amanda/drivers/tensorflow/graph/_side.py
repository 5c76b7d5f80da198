"""Facts of tensors that routines at an operation are given."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_OPAQUE = (tf.resource, tf.variant)


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

"""TensorFlow's tensors as blocks of real numbers, and the bins of those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amanda.tools.stats import _numpy

BLOCK = 1 << 22
"""Numbers that are worked on at once: as many as keep a device busy."""


def numbers(tensor: Any) -> tuple[Any, int]:
    """The numbers of a tensor in one row; TensorFlow's ops have dense tensors alone."""
    import tensorflow as tf

    if tensor.dtype.is_complex:
        tensor = tf.abs(tensor)
    return tf.reshape(tensor, [-1]), 0


def blocks(row: Any) -> Iterator[Any]:
    """Parts of a row in float64; of what is on the host, numpy's arrays."""
    import tensorflow as tf

    if "CPU" in row.device:
        yield from _numpy.blocks(row.numpy())
        return
    for start in range(0, int(row.shape[0]), BLOCK):
        yield tf.cast(row[start : start + BLOCK], tf.float64)


def leading_bits(block: Any, bits: int) -> tuple[Any, int]:
    """Exponent and first bits of the mantissa of magnitudes, as integers; those of the number 1."""
    import tensorflow as tf

    integers = tf.bitcast(tf.abs(block), tf.int64)
    return tf.bitwise.right_shift(integers, tf.constant(52 - bits, tf.int64)), 1023 << bits


def counts(indices: Any, total: int) -> Any:
    """Return the number of times that each index occurs."""
    import tensorflow as tf

    return tf.math.bincount(indices, minlength=total, maxlength=total, dtype=tf.int64)


def place(tensor: Any) -> str:
    """Return where a tensor lies."""
    return str(tensor.device)


def arrays(tensors: list[Any]) -> list[Any]:
    """Tensors as arrays of numpy."""
    return [tensor.numpy() for tensor in tensors]

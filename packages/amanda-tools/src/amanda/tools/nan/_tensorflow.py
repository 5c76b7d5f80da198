"""TensorFlow's tensors of every element type, as ones that every function takes."""

from __future__ import annotations

from typing import Any


def plain(tensor: Any) -> Any:
    """Magnitudes of complex numbers; numbers of fewer than 16 bits, and bfloat16, as float32."""
    import tensorflow as tf

    if tensor.dtype.is_complex:
        return tf.abs(tf.cast(tensor, tf.complex128))  # which does not overflow for those of fewer bits
    return tensor if tensor.dtype in (tf.float16, tf.float32, tf.float64) else tf.cast(tensor, tf.float32)


def total(tensor: Any) -> Any:
    """The sum of all elements, with a range that sums of fewer bits do not leave."""
    import tensorflow as tf

    return tf.reduce_sum(tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor)

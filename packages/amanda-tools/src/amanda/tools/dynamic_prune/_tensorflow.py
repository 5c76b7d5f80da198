"""What autoray has no word for, in TensorFlow."""

from __future__ import annotations

from typing import Any


def parameter(array: Any, like: Any) -> Any:
    """A variable, outside of any graph; of half precision it would not train."""
    import tensorflow as tf

    with tf.init_scope():
        return tf.Variable(array, dtype=tf.float64 if like.dtype == tf.float64 else tf.float32)


def tensor(array: Any, like: Any) -> Any:
    """An array in the type of `like`."""
    import tensorflow as tf

    return tf.cast(tf.convert_to_tensor(array), like.dtype)


def stop(value: Any) -> Any:
    """The value, through which no gradient goes."""
    import tensorflow as tf

    return tf.stop_gradient(value)


def sigmoid(value: Any) -> Any:
    """The logistic function."""
    import tensorflow as tf

    return tf.sigmoid(value)


def winners(values: Any, count: int) -> Any:
    """0/1 mask of the largest along the last axis; of equal ones the first."""
    import tensorflow as tf

    _, places = tf.math.top_k(tf.stop_gradient(values), count)
    return tf.reduce_sum(tf.one_hot(places, values.shape[-1], dtype=values.dtype), axis=-2)

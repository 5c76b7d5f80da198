"""What autoray has no word for, in TensorFlow."""

from __future__ import annotations

from typing import Any


def parameter(value: Any, like: Any) -> Any:
    """A variable of its own, outside of any graph; of half precision it would not train."""
    import tensorflow as tf

    with tf.init_scope():
        if isinstance(value, tf.Variable):
            if not tf.executing_eagerly():
                return value
            value = value.numpy()
        return tf.Variable(value, dtype=tf.float64 if like.dtype == tf.float64 else tf.float32)


def renewed(former: Any, value: Any) -> Any:
    """A variable with other values, or these where they are of another type."""
    import tensorflow as tf

    with tf.init_scope():
        if former.dtype != value.dtype or not tf.executing_eagerly():
            return value
        former.assign(value)
    return former


def sigmoid(value: Any) -> Any:
    """The logistic function."""
    import tensorflow as tf

    return tf.sigmoid(value)


def winners(values: Any, count: int) -> Any:
    """0/1 mask of the largest along the last axis; of equal ones the first."""
    import tensorflow as tf

    _, places = tf.math.top_k(tf.stop_gradient(values), count)
    return tf.reduce_sum(tf.one_hot(places, values.shape[-1], dtype=values.dtype), axis=-2)


def local(x: Any, kernel: Any, stride: tuple[int, int], layout: str) -> Any:
    """A convolution of 3x3 with a margin of one: (N, height, width).  kernel: (3, 3, C)."""
    import tensorflow as tf

    if layout == "NCHW":
        x = tf.transpose(x, (0, 2, 3, 1))
    x = tf.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return tf.nn.conv2d(x, kernel[..., None], stride, "VALID")[..., 0]


def spread(mask: Any, kernel: list[list[float]], stride: tuple[int, int]) -> Any:
    """The sum of a kernel put at each position of (N, height, width)."""
    import tensorflow as tf

    weight = tf.constant(kernel, mask.dtype)[..., None, None]
    rows, columns = ((mask.shape[1 + i] - 1) * stride[i] + weight.shape[i] for i in (0, 1))
    shape = (mask.shape[0], rows, columns, 1)
    return tf.nn.conv2d_transpose(mask[..., None], weight, shape, stride, "VALID")[..., 0]


def padded(mask: Any, more: tuple[int, int]) -> Any:
    """With rows and columns of zeros behind."""
    import tensorflow as tf

    return tf.pad(mask, ((0, 0), (0, more[0]), (0, more[1])))

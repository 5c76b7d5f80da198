"""TensorFlow: masks are computed with arrays, which on the host share the memory of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.tools.prune import _numpy

plain, row, lowest_dropped, ranks = _numpy.plain, _numpy.row, _numpy.lowest_dropped, _numpy.ranks
like, numbers, stored = _numpy.like, _numpy.numbers, _numpy.stored


def as_mask(kept: Any, weight: Any) -> Any:
    """A mask of 0 and 1 in the weight's own type, on its device."""
    import tensorflow as tf

    with tf.device(weight.device):
        return tf.cast(tf.constant(np.asarray(kept)), weight.dtype)

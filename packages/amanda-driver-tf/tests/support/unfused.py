"""TensorFlow that computes as it is written, also where oneDNN would not let it for certain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def unfused() -> Iterator[None]:
    """Context in which grappler folds and fuses no operators, so that a copy of a graph computes the same."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})

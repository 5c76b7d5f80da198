"""TensorFlow without fusion of operators, so that a routine between two of them leaves every bit as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from amanda.errors import DriverError
from amanda.options import checked
from tensorflow.python.util import _pywrap_util_port

_DISABLE_META_OPTIMIZER = "disable_meta_optimizer"


@contextmanager
def without_fusion() -> Iterator[None]:
    """Return a context in which TensorFlow fuses, folds and moves no operator of a function.

    In it, functions with routines that change nothing give the same bits as functions without routines.
    Functions that were traced before are included, and so are calls on other threads meanwhile. For sessions,
    use `session_config`. Execution is slower.

    Raises DriverError if oneDNN fuses operators; only an environment variable of the process turns that off.

    >>> with without_fusion():  # doctest: +SKIP
    ...     expected = model(x)
    ...     with amanda.apply(tool):
    ...         assert (model(x) == expected).numpy().all()
    """
    _check_that_onednn_does_not_fuse()
    was_disabled = tf.config.optimizer.get_experimental_options().get(_DISABLE_META_OPTIMIZER, False)
    tf.config.optimizer.set_experimental_options({_DISABLE_META_OPTIMIZER: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({_DISABLE_META_OPTIMIZER: was_disabled})


@checked
def session_config(config: tf.compat.v1.ConfigProto | None = None) -> Any:
    """Return a ConfigProto for sessions without fusion.

    Args:
        config: The ConfigProto to copy; None for the default.

    Raises:
        DriverError: If oneDNN fuses operators; only an environment variable of the process turns that off.
    """
    _check_that_onednn_does_not_fuse()
    unfused_config = tf.compat.v1.ConfigProto()
    if config is not None:
        unfused_config.CopyFrom(config)
    unfused_config.graph_options.rewrite_options.disable_meta_optimizer = True
    return unfused_config


def _check_that_onednn_does_not_fuse() -> None:
    """Raise DriverError if TensorFlow runs ops by oneDNN, which fuses them."""
    # The optimizer's options do not reach oneDNN, which fuses in a pass of its own.
    if _pywrap_util_port.IsMklEnabled():
        raise DriverError(
            "oneDNN fuses operators in a pass of its own; set TF_ENABLE_ONEDNN_OPTS=0 in the environment, "
            "before TensorFlow is imported, to be without fusion"
        )

"""TensorFlow without fusion of operators, so that a routine between two of them leaves every bit as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from amanda.errors import DriverError
from amanda.options import checked
from tensorflow.python.util import _pywrap_util_port

_OPTION = "disable_meta_optimizer"


@contextmanager
def without_fusion() -> Iterator[None]:
    """Call functions within as they are written: no operator is fused, folded or moved.

    What routines change nothing of is then the same to the bit as without them, where that is also called
    within. For functions, also those traced before; `session_config` is the same for sessions. Slower.

    Raises DriverError where oneDNN fuses operators, which only the environment of the process turns off.

    >>> with without_fusion():  # doctest: +SKIP
    ...     expected = model(x)
    ...     with amanda.apply(tool):
    ...         assert (model(x) == expected).numpy().all()
    """
    _check()
    before = tf.config.optimizer.get_experimental_options().get(_OPTION, False)
    tf.config.optimizer.set_experimental_options({_OPTION: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({_OPTION: before})


@checked
def session_config(config: tf.compat.v1.ConfigProto | None = None) -> Any:
    """A ConfigProto for a session that fuses nothing: a copy of `config`, else of the default one.

    Raises DriverError where oneDNN fuses operators, which only the environment of the process turns off.
    """
    _check()
    made = tf.compat.v1.ConfigProto()
    if config is not None:
        made.CopyFrom(config)
    made.graph_options.rewrite_options.disable_meta_optimizer = True
    return made


def _check() -> None:
    if _pywrap_util_port.IsMklEnabled():
        raise DriverError(
            "oneDNN fuses operators in a pass of its own; set TF_ENABLE_ONEDNN_OPTS=0 in the environment, "
            "before TensorFlow is imported, to be without fusion"
        )

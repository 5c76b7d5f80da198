"""Amanda's driver for TensorFlow: one class for each mode, which can fail alone."""

from typing import TYPE_CHECKING

from amanda.backend import lazy_getattr

if TYPE_CHECKING:
    from amanda.drivers.tensorflow._fusion import session_config, without_fusion
    from amanda.drivers.tensorflow.eager import TensorFlowEagerDriver
    from amanda.drivers.tensorflow.function import FunctionDriver
    from amanda.drivers.tensorflow.session import GraphDriver

__all__ = ["FunctionDriver", "GraphDriver", "TensorFlowEagerDriver", "session_config", "without_fusion"]

# TensorFlow is imported with the first of these names.
__getattr__ = lazy_getattr(
    __name__,
    {
        "FunctionDriver": "function",
        "GraphDriver": "session",
        "TensorFlowEagerDriver": "eager",
        "session_config": "_fusion",
        "without_fusion": "_fusion",
    },
)

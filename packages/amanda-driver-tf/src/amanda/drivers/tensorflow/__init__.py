"""Amanda's driver for TensorFlow: one class for each mode, which can fail alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.drivers.tensorflow._fusion import session_config, without_fusion
    from amanda.drivers.tensorflow.eager import TensorFlowEagerDriver
    from amanda.drivers.tensorflow.function import FunctionDriver
    from amanda.drivers.tensorflow.session import GraphDriver

__all__ = [
    "FunctionDriver",
    "GraphDriver",
    "TensorFlowEagerDriver",
    "session_config",
    "without_fusion",
]

_HOMES = {
    "FunctionDriver": "function",
    "GraphDriver": "session",
    "TensorFlowEagerDriver": "eager",
    "session_config": "_fusion",
    "without_fusion": "_fusion",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` from its module at its first use, to import TensorFlow late."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

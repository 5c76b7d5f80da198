"""Amanda's driver for ONNX Runtime, and routines written into ONNX models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.drivers.onnxruntime._driver import OnnxRuntimeDriver
    from amanda.drivers.onnxruntime._file import instrument
    from amanda.drivers.onnxruntime._model import session_options

__all__ = ["OnnxRuntimeDriver", "instrument", "session_options"]

_HOMES = {
    "OnnxRuntimeDriver": "_driver",
    "instrument": "_file",
    "session_options": "_model",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Amanda's driver for ONNX Runtime, and routines written into ONNX models."""

from typing import TYPE_CHECKING

from amanda.backend import lazy_getattr

if TYPE_CHECKING:
    from amanda.drivers.onnxruntime._driver import OnnxRuntimeDriver
    from amanda.drivers.onnxruntime._file import instrument
    from amanda.drivers.onnxruntime._model import session_options

__all__ = ["OnnxRuntimeDriver", "instrument", "session_options"]

__getattr__ = lazy_getattr(
    __name__, {"OnnxRuntimeDriver": "_driver", "instrument": "_file", "session_options": "_model"}
)

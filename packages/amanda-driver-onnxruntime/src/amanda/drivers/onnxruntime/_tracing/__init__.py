"""NumPy's functions recorded as nodes of ONNX."""

from ._array import TracedArray
from ._recorder import LEAST_OPSET, Recorder

__all__ = ["LEAST_OPSET", "Recorder", "TracedArray"]

"""NumPy's functions recorded as nodes of ONNX."""

from ._array import TracedArray
from ._recorder import LEAST_OPSET, NodeRecorder

__all__ = ["LEAST_OPSET", "NodeRecorder", "TracedArray"]

"""NumPy's functions recorded as nodes of ONNX."""

from ._array import LEAST_OPSET, NodeRecorder, TracedArray

__all__ = ["LEAST_OPSET", "NodeRecorder", "TracedArray"]

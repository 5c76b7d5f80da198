"""Undocumented names of ONNX Runtime that the driver needs, and a model of one op to try it with."""

import numpy as np
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

import onnxruntime

NEWEST_TESTED = "1.32"
_SESSION = "onnxruntime.capi.onnxruntime_inference_collection:Session"
PRIVATE_NAMES = (
    # Methods of the Python class around the native session, which the driver replaces while it is attached.
    *(f"{_SESSION}.{name}" for name in ("run", "run_with_ort_values", "run_async", "run_with_iobinding")),
    # Sessions share large weights by it; without it each part would hold a copy of them.
    "onnxruntime:SessionOptions.add_external_initializers",
)


def run_tanh() -> list[float]:
    """Return what a session of a model with one op gives."""
    x, y = (make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in "xy")
    graph = make_graph([make_node("Tanh", ["x"], ["y"])], "exercise", [x], [y])
    # Versions that every runtime which the driver supports can read.
    model = make_model(graph, opset_imports=[make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.array([0.5, -0.25])})
    return [*result.tolist()]

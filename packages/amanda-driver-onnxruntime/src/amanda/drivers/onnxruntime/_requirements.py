"""Undocumented names of ONNX Runtime that the driver needs, and a model of one op to try it with."""

from importlib.metadata import version

import numpy as np
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

import onnxruntime
from amanda.errors import DriverError
from onnxruntime.capi import onnxruntime_inference_collection as collection

NEWEST_TESTED = "1.32"
# Methods of the Python class around the native session, which the driver replaces while it is attached.
_METHODS = ("run", "run_with_ort_values", "run_async", "run_with_iobinding")


def run_tanh() -> list[float]:
    """Return what a session of a model with one op gives."""
    x, y = (make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in "xy")
    graph = make_graph([make_node("Tanh", ["x"], ["y"])], "exercise", [x], [y])
    # Versions that every runtime which the driver supports can read.
    model = make_model(graph, opset_imports=[make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.array([0.5, -0.25])})
    return [*result.tolist()]


def check() -> None:
    """Raise DriverError, which names what is missing, if sessions cannot be instrumented."""
    session = getattr(collection, "Session", None)
    lacking = [f"Session.{name}" for name in _METHODS if not hasattr(session, name)]
    # Sessions share large weights by it; without it each part would hold a copy of them.
    if not hasattr(onnxruntime.SessionOptions, "add_external_initializers"):
        lacking.append("SessionOptions.add_external_initializers")
    if lacking:
        raise DriverError(
            f"onnxruntime {onnxruntime.__version__} lacks {', '.join(lacking)}, without which its sessions "
            f"cannot be instrumented; amanda-driver-onnxruntime {version('amanda-driver-onnxruntime')} was "
            f'tested with onnxruntime up to {NEWEST_TESTED}: pip install "onnxruntime=={NEWEST_TESTED}.*", '
            "or a newer driver"
        )

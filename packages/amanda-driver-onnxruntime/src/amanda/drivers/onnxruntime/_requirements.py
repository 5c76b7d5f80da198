"""Undocumented names of ONNX Runtime that the driver needs."""

from importlib.metadata import version

import onnxruntime
from amanda.errors import DriverError
from onnxruntime.capi import onnxruntime_inference_collection as collection

TESTED_VERSIONS = ("1.20", "1.31")
# Methods of the Python class around the native session, which the driver replaces while it is attached.
_METHODS = ("run", "run_with_ort_values", "run_async", "run_with_iobinding")


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
            f"tested with onnxruntime {', '.join(TESTED_VERSIONS)}: pip install "
            f'"onnxruntime=={TESTED_VERSIONS[-1]}.*", or a newer driver'
        )

"""Base of tools that look: tensors of any library, the ops that produced them, weight layouts, windows.

A tool that observes tensors derives from `TensorTool`; one that changes weights from
`amanda.tools.weights.WeightTool`.
"""

from typing import Any

from amanda.options import warn_deprecated
from amanda.plugins import import_from
from amanda.tools.kit._axes import Unfolding, Window, canonical, canonical_extents, restored, windows_of
from amanda.tools.kit._dataflow import Dataflow, DataflowNode
from amanda.tools.kit._progress import Progress, check_number
from amanda.tools.kit._tensor_tool import (
    OpRecord,
    OpTensor,
    Role,
    TensorTool,
    leaves,
    op_tensors,
    parameter_inputs,
    remarks_on_packed_inputs,
)
from amanda.tools.kit._tensors import RequiredNames, Samples, Tensors, TensorsError, shape_text, tensors_of

__all__ = [
    "Dataflow", "DataflowNode", "OpRecord", "OpTensor", "Progress", "RequiredNames", "Role",
    "Samples", "TensorTool", "Tensors", "TensorsError", "Unfolding", "Window", "canonical",
    "canonical_extents", "check_number", "leaves", "op_tensors", "parameter_inputs",
    "remarks_on_packed_inputs", "restored", "shape_text", "tensors_of", "windows_of",
]  # fmt: skip

# Names that were here, by the package that has them now.
_MOVED = {
    **dict.fromkeys(("BitField", "bits_of", "from_bytes", "to_bytes"), "amanda.tools.inject"),
    **dict.fromkeys(("Rerun", "rerun", "spatial_axes", "undisturbed"), "amanda.tools.mapping"),
    **dict.fromkeys(
        ("Weight", "WeightError", "WeightInput", "WeightReads", "WeightResult", "WeightTool", "weight_input"),
        "amanda.tools.weights",
    ),
    "Globs": "amanda.tools.select", "TensorMap": "amanda.backend", "read_onnx": "amanda.tools.onnx_graph",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a name that was here from the package that has it now, and warn."""
    package = _MOVED.get(name)
    if package is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_deprecated(f"{__name__}.{name}", f"{package}.{name}", "amanda-tools 0.2", "0.4")
    return import_from(package, name)

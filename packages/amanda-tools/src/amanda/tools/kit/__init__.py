"""Base of tools that look: tensors of any library, and the ops that read and give them.

A tool that observes tensors derives from `TensorTool`; one that changes weights from
`amanda.tools.weights.WeightTool`.
"""

from typing import Any

from amanda.options import warn_deprecated
from amanda.plugins import import_from
from amanda.tools.kit._tensor_tool import (
    Dtype,
    OpRecord,
    OpTensor,
    Role,
    TensorTool,
    folded_unread,
    leaves,
    op_tensors,
    parameter_inputs,
    parameter_paths,
    remarks_on_packed_inputs,
    torch_tensors,
)
from amanda.tools.kit._tensors import (
    RequiredNames,
    Samples,
    Tensors,
    TensorsError,
    place_text,
    shape_text,
    tensors_of,
)

__all__ = [
    "Dtype", "OpRecord", "OpTensor", "RequiredNames", "Role", "Samples", "TensorTool", "Tensors",
    "TensorsError", "folded_unread", "leaves", "op_tensors", "parameter_inputs", "parameter_paths",
    "place_text", "remarks_on_packed_inputs", "shape_text", "tensors_of", "torch_tensors",
]  # fmt: skip

# Names that were here, by the package that has them now.
_MOVED = {
    **dict.fromkeys(("BitField", "bits_of", "from_bytes", "to_bytes"), "amanda.tools.inject"),
    **dict.fromkeys(("Rerun", "rerun", "undisturbed"), "amanda.tools.rerun"),
    **dict.fromkeys(
        ("Unfolding", "Window", "canonical", "canonical_extents", "restored", "windows_of"),
        "amanda.tools.axes",
    ),
    **dict.fromkeys(("Dataflow", "DataflowNode"), "amanda.tools.dataflow"),
    **dict.fromkeys(("Progress", "check_number"), "amanda.tools.trials"),
    **dict.fromkeys(
        ("Weight", "WeightError", "WeightInput", "WeightReads", "WeightResult", "WeightTool", "weight_input"),
        "amanda.tools.weights",
    ),
    "Globs": "amanda.tools.select", "TensorMap": "amanda.backend", "read_onnx": "amanda.tools.onnx_graph",
    "spatial_axes": "amanda.tools.mapping",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a name that was here from the package that has it now, and warn."""
    package = _MOVED.get(name)
    if package is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_deprecated(f"{__name__}.{name}", f"{package}.{name}", "amanda-tools 0.2", "0.4")
    return import_from(package, name)

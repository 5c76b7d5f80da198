"""Types of values that ONNX cannot infer, such as those of ONNX Runtime's own ops, from a session."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, TypeProto, ValueInfoProto

import onnxruntime

from ._options import session_options

_ELEMENTS = {
    "float": "FLOAT", "double": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "string": "STRING",
    "bool": "BOOL", "complex64": "COMPLEX64", "complex128": "COMPLEX128",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)},
}  # fmt: skip
_TENSOR = re.compile(r"tensor\((\w+)\)")


def types_by_onnxruntime(
    proto: ModelProto, names: Sequence[str], constants: Mapping[str, Any]
) -> dict[str, TypeProto]:
    """Return types of values of the outermost graph, from ONNX Runtime; {} for a model that it refuses.

    constants: values of initializers; large ones are not in the model.
    """
    probe = ModelProto()
    probe.CopyFrom(proto)
    add_outputs(probe.graph, names)
    settings = session_options()
    external = {
        tensor.name: onnxruntime.OrtValue.ortvalue_from_numpy(constants[tensor.name])
        for tensor in probe.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    if external:
        settings.add_external_initializers(list(external), list(external.values()))
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception:  # the error comes up again when the user loads the model
        return {}
    return output_types(session, names)


def add_outputs(graph: GraphProto, names: Sequence[str]) -> None:
    """Add values of these names to the outputs of a graph."""
    present = {output.name for output in graph.output}
    graph.output.extend(ValueInfoProto(name=name) for name in names if name not in present)


def output_types(session: Any, names: Sequence[str]) -> dict[str, TypeProto]:
    """Return the types of a session's outputs that are tensors."""
    types = {output.name: _type_of_argument(output) for output in session.get_outputs()}
    return {name: type for name in names if (type := types.get(name)) is not None}


def _type_of_argument(argument: Any) -> TypeProto | None:
    """Return the type of a session's output; None if it is no tensor."""
    match = _TENSOR.fullmatch(argument.type)
    if match is None or match[1] not in _ELEMENTS:
        return None
    element = onnx.TensorProto.DataType.Value(_ELEMENTS[match[1]])
    extents = argument.shape or None  # ONNX Runtime reports a scalar like an unknown shape
    shape = extents and [
        extent if isinstance(extent, str) or (extent or 0) > -1 else None for extent in extents
    ]
    return onnx.helper.make_tensor_type_proto(element, shape)

"""Types of values that ONNX does not infer, as ONNX Runtime does: of its own ops, and of custom ones."""

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
    """Types of values of the outermost graph, as far as ONNX Runtime tells; {} of a model it refuses.

    constants: values of initializers, of which large ones are apart.
    """
    probe = ModelProto()
    probe.CopyFrom(proto)
    add_outputs(probe.graph, names)
    settings = session_options()
    apart = {
        tensor.name: onnxruntime.OrtValue.ortvalue_from_numpy(constants[tensor.name])
        for tensor in probe.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    if apart:
        settings.add_external_initializers(list(apart), list(apart.values()))
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception:  # what it refuses, it says when the model itself is loaded
        return {}
    return types_told(session, names)


def add_outputs(graph: GraphProto, names: Sequence[str]) -> None:
    """Add values of these names to the outputs of a graph."""
    known = {one.name for one in graph.output}
    graph.output.extend(ValueInfoProto(name=name) for name in names if name not in known)


def types_told(session: Any, names: Sequence[str]) -> dict[str, TypeProto]:
    """Types of a session's outputs, of those that are tensors."""
    told = {one.name: _type(one) for one in session.get_outputs()}
    return {name: type for name in names if (type := told.get(name)) is not None}


def _type(argument: Any) -> TypeProto | None:
    found = _TENSOR.fullmatch(argument.type)
    if found is None or found[1] not in _ELEMENTS:
        return None
    element = onnx.TensorProto.DataType.Value(_ELEMENTS[found[1]])
    known = argument.shape or None  # that of a scalar is told as one that is not known
    shape = known and [one if isinstance(one, str) or (one or 0) > -1 else None for one in known]
    return onnx.helper.make_tensor_type_proto(element, shape)

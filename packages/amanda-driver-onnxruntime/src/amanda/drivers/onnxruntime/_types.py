"""Types of values that ONNX does not infer, as ONNX Runtime does: of its own ops, and of custom ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import ModelProto, TypeProto, ValueInfoProto

import onnxruntime

from ._options import session_options

_ELEMENTS = {
    "float": "FLOAT", "double": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "string": "STRING",
    "bool": "BOOL", "complex64": "COMPLEX64", "complex128": "COMPLEX128",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)},
}  # fmt: skip
_TENSOR = re.compile(r"tensor\((\w+)\)")


def types_by_onnxruntime(
    proto: ModelProto,
    names: Sequence[str],
    options: Any = None,
    constants: Mapping[str, Any] | None = None,
) -> dict[str, TypeProto]:
    """Types of values of the outermost graph, as far as ONNX Runtime tells; {} of a model it refuses.

    proto: whose large initializers may be apart, in `constants`.
    """
    probe = ModelProto()
    probe.CopyFrom(proto)
    known = {one.name for one in probe.graph.output}
    probe.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in known)
    settings = session_options(onnxruntime.SessionOptions() if options is None else options)
    apart = {
        tensor.name: onnxruntime.OrtValue.ortvalue_from_numpy(constants[tensor.name])
        for tensor in probe.graph.initializer
        if constants and tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    if apart:
        settings.add_external_initializers(list(apart), list(apart.values()))
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception:  # what it refuses, it says when the model itself is loaded
        return {}
    told = {one.name: _type(one) for one in session.get_outputs()}
    return {name: type for name in names if (type := told.get(name)) is not None}


def _type(argument: Any) -> TypeProto | None:
    found = _TENSOR.fullmatch(argument.type)
    if found is None or found[1] not in _ELEMENTS:
        return None
    element = onnx.TensorProto.DataType.Value(_ELEMENTS[found[1]])
    shape = (
        None
        if argument.shape is None
        else [one if isinstance(one, (int, str)) else None for one in argument.shape]
    )
    return onnx.helper.make_tensor_type_proto(element, shape)

"""A model as it is read: its graph without large weights, these as arrays, and the types of all values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    GraphProto,
    ModelProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    external_data_helper,
    inliner,
    numpy_helper,
)
from onnx.external_data_helper import ExternalDataInfo

from amanda.files import file_beside

from ._names import bodies_of, captured
from ._symbols import Array, Symbol, tensor_type

TypesOf = Callable[[ModelProto, Sequence[str], Mapping[str, Array]], Mapping[str, TypeProto]]
"""Gives the types of values by name, of a model whose initializers have these values."""
SMALL = 1024
"""Bytes up to which a constant stays in the graph: shapes and axes, which type inference reads."""


class Model:
    """A model whose nodes are analysed and rewritten.

    proto: without functions, which are inlined, and without the data of large initializers.
    constants: the value of each initializer and Constant node of the outermost graph.
    opsets: version by domain.  overridable: names of inputs that have a default.
    types: of the values of the outermost graph, by name, as far as they are known.
    """

    def __init__(self, proto: ModelProto, folder: str = "", overridable: Iterable[str] | None = None) -> None:
        inlined = inliner.inline_local_functions(proto) if proto.functions else proto
        self.constants: dict[str, Array] = {}
        self.proto = self._light(inlined, folder)
        graph = self.proto.graph
        for node in graph.node:
            value = constant_of(node, folder)
            if value is not None:
                self.constants[node.output[0]] = value
        self.opsets = {one.domain: one.version for one in self.proto.opset_import}
        self.opsets["ai.onnx"] = self.opsets.get("", 1)
        given = {one.name for one in graph.input}
        inherent = given & self.constants.keys() if self.proto.ir_version >= 4 else set()
        self.overridable = set(inherent if overridable is None else overridable)
        self.inputs = [one.name for one in graph.input if one.name not in self.constants]
        self.outputs = [one.name for one in graph.output]
        self.types: dict[str, TypeProto] = {}

    @classmethod
    def of_file(cls, path: str, overridable: Iterable[str] | None = None) -> Model:
        """The model in a file, whose external data stay there until they are read."""
        return cls(read_proto(Path(path)), str(Path(path).parent), overridable)

    def infer_types(self, others: TypesOf) -> None:
        """Find the types of all values; `others` gives those, by name, that ONNX' own inference does not."""
        graph = infer_shapes(self.proto).graph
        self.proto.graph.CopyFrom(graph)
        self.types = types_in(graph)
        unknown = [
            name for node in graph.node for name in node.output if name and not is_typed(self.types.get(name))
        ]
        if unknown:
            self.types.update(others(self.proto, unknown, self.constants))
        self._infer_in_bodies(self.proto.graph, self.types, others)

    def _infer_in_bodies(self, graph: GraphProto, outer: Mapping[str, TypeProto], others: TypesOf) -> None:
        """Write the types of values in bodies there, as far as `others` gives them."""
        for node in graph.node:
            for body in bodies_of(node):
                types = {**outer, **types_in(body)}
                made = [name for inner in body.node for name in inner.output if name]
                unknown = [name for name in made if not is_typed(types.get(name))]
                if unknown:
                    found = others(self._alone(body, types), unknown, self.constants)
                    body.value_info.extend(
                        ValueInfoProto(name=name, type=type) for name, type in found.items()
                    )
                    types.update(found)
                self._infer_in_bodies(body, types, others)

    def _alone(self, body: GraphProto, types: Mapping[str, TypeProto]) -> ModelProto:
        """Return a model of a body, which is given what the body reads of the graphs around."""
        made = ModelProto(ir_version=self.proto.ir_version, opset_import=self.proto.opset_import)
        made.graph.name = "body"
        made.graph.node.extend(body.node)
        made.graph.initializer.extend(body.initializer)
        made.graph.input.extend(body.input)
        held = {tensor.name: tensor for tensor in self.proto.graph.initializer}
        for name in dict.fromkeys(captured(body)):
            if name in held:
                made.graph.initializer.append(held[name])
            elif name in types:
                made.graph.input.append(ValueInfoProto(name=name, type=types[name]))
        return made

    def symbol(self, name: str) -> Symbol:
        """The symbol of a value of the outermost graph."""
        constant = self.constants.get(name)
        type = self.types.get(name)
        if constant is None:
            return Symbol(name, type)
        type = type if is_typed(type) else tensor_type(constant.dtype, constant.shape)
        if name in self.overridable:
            return Symbol(name, type, default=constant, root=name)
        return Symbol(name, type, constant, root=name)

    def _light(self, proto: ModelProto, folder: str) -> ModelProto:
        made = ModelProto()
        made.CopyFrom(proto)
        forget_negative_extents(made.graph)
        for tensor in made.graph.initializer:
            self.constants[tensor.name] = array = array_of(tensor, folder)
            if array.nbytes > SMALL and is_shared(array):
                refer(tensor)
        for sparse in made.graph.sparse_initializer:
            self.constants[sparse.values.name] = dense(sparse)
        return made


def read_proto(path: Path) -> ModelProto:
    """Read a model without its external data.

    Raises ArtefactError, before anything is read of them, where these are no regular files in its folder.
    """
    proto = onnx.load(path, load_external_data=False)
    sparse = (part for one in proto.graph.sparse_initializer for part in (one.values, one.indices))
    for tensor in (*external_data_helper._get_all_tensors(proto), *sparse):
        if external_data_helper.uses_external_data(tensor):
            file_beside(path, ExternalDataInfo(tensor).location, f"the data of {tensor.name}")
    return proto


def array_of(tensor: TensorProto, folder: str = "") -> Array:
    """A tensor's values, which cannot be written; external ones are mapped from their file."""
    if tensor.data_location == TensorProto.EXTERNAL:
        array = _mapped(tensor, folder)
    else:
        array = np.asarray(numpy_helper.to_array(tensor))
    array.flags.writeable = False
    return array


def dense(tensor: SparseTensorProto) -> Array:
    """The values of a sparse tensor, which cannot be written."""
    values, indices = numpy_helper.to_array(tensor.values), numpy_helper.to_array(tensor.indices)
    array = np.zeros(tuple(tensor.dims), values.dtype)
    array[np.unravel_index(indices, array.shape) if indices.ndim == 1 else tuple(indices.T)] = values
    array.flags.writeable = False
    return array


def _mapped(tensor: TensorProto, folder: str) -> Array:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if dtype.kind not in "fiub" or not prod(tensor.dims):
        return np.array(numpy_helper.to_array(tensor, folder))
    where = ExternalDataInfo(tensor)
    path = Path(folder, where.location)
    return np.memmap(path, dtype, "r", where.offset or 0, tuple(tensor.dims))


def is_shared(array: Array) -> bool:
    """Return True if sessions can use an array as it is."""
    return array.dtype.kind in "fiub" and array.dtype.type.__module__ == "numpy"


def refer(tensor: TensorProto) -> None:
    """Take the values out of an initializer; a session is given them apart."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value="in memory")


def referred(name: str, array: Array) -> TensorProto:
    """An initializer of an array, whose values a session is given apart where it is large."""
    if array.nbytes <= SMALL or not is_shared(array):
        return numpy_helper.from_array(np.asarray(array), name)
    element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=element, dims=array.shape)
    refer(tensor)
    return tensor


def constant_of(node: onnx.NodeProto, folder: str = "") -> Array | None:
    """Return what a Constant node gives; None of another node, and where it is no dense tensor.

    folder: that of its external data.
    """
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    value: Any = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return array_of(value, folder)
    dtype = _CONSTANTS.get(attribute.name)
    return None if dtype is None else np.array(value, dtype)


_CONSTANTS: dict[str, Any] = {
    "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64,
}  # fmt: skip


def infer_shapes(proto: ModelProto) -> ModelProto:
    """The model with the types of its values, as far as ONNX infers them."""
    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # what a model says of itself may contradict what is inferred: it runs all the same
        return proto


def types_in(graph: GraphProto) -> dict[str, TypeProto]:
    """The types that a graph tells, by the name of the value."""
    told = [*graph.value_info, *graph.output, *graph.input]
    types = {one.name: one.type for one in told if one.HasField("type")}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def forget_negative_extents(graph: GraphProto) -> None:
    """Leave out extents below 0, by which some exporters mean one that is known at execution alone."""
    for told in (*graph.input, *graph.output, *graph.value_info):
        if told.type.WhichOneof("value") == "tensor_type":
            for extent in told.type.tensor_type.shape.dim:
                if extent.dim_value < 0:
                    extent.ClearField("value")
    for node in graph.node:
        for body in bodies_of(node):
            forget_negative_extents(body)


def is_typed(type: TypeProto | None) -> bool:
    """Return True if a type is known, its shape apart."""
    if type is None or type.WhichOneof("value") is None:
        return False
    return type.WhichOneof("value") != "tensor_type" or bool(type.tensor_type.elem_type)


def is_all_typed(graph: GraphProto) -> bool:
    """Return True if the type of each value that a graph makes or is given is known."""
    types = types_in(graph)
    names = [one.name for one in graph.input]
    names += [name for node in graph.node for name in node.output if name]
    return all(is_typed(types.get(name)) for name in names)

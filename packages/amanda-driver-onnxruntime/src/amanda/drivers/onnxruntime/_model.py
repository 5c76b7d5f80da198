"""A model: its graph without large weights, the weights as arrays, the types of all values.

Sessions with `session_options` fuse nothing, so that a routine between two ops leaves every bit as it is.
"""

from __future__ import annotations

import re
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

import onnxruntime
from amanda.files import file_beside
from amanda.options import checked

from ._values import Array, OnnxSymbol, bodies_of, names_captured, tensor_type


@checked
def session_options(options: onnxruntime.SessionOptions | None = None) -> Any:
    """Return SessionOptions with which a session fuses, folds and moves no node.

    Weights are not packed either: a kernel for packed weights may compute other bits than a kernel that gets
    its weights at each run.  With these options, routines that change nothing leave each bit of the results.

    Args:
        options: A SessionOptions to change; a new one by default.

    >>> session_options().graph_optimization_level.name
    'ORT_DISABLE_ALL'
    """
    unfused_options = onnxruntime.SessionOptions() if options is None else options
    unfused_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    unfused_options.add_session_config_entry("session.disable_prepacking", "1")
    return unfused_options


TypesOf = Callable[[ModelProto, Sequence[str], Mapping[str, Array]], Mapping[str, TypeProto]]
"""Returns the types of named values of a model, whose large initializers are passed as arrays."""
SMALL = 1024
"""Bytes up to which a constant stays in the graph, such as shapes and axes, which type inference reads."""


class Model:
    """A model whose nodes are analysed and rewritten.

    proto: the model with functions inlined, without the data of large initializers.
    constants: values of the initializers and Constant nodes of the outermost graph, by name.
    opsets: version by domain.  overridable: names of inputs with a default.
    types: known types of the values of the outermost graph, by name.
    """

    def __init__(self, proto: ModelProto, folder: str = "", overridable: Iterable[str] | None = None) -> None:
        # A local function has one graph for all its calls, while routines differ from call to call.
        inlined_model = inliner.inline_local_functions(proto) if proto.functions else proto
        self.constants: dict[str, Array] = {}
        self.proto = self._copy_without_values(inlined_model, folder)
        graph = self.proto.graph
        for node in graph.node:
            value = constant_of(node, folder)
            if value is not None:
                self.constants[node.output[0]] = value
        self.opsets = {entry.domain: entry.version for entry in self.proto.opset_import}
        # Both spell ONNX' own domain.
        self.opsets["ai.onnx"] = self.opsets.get("", 1)
        input_names = {entry.name for entry in graph.input}
        # Before IR version 4 each initializer is an input, without being meant as a default.
        with_default = input_names & self.constants.keys() if self.proto.ir_version >= 4 else set()
        self.overridable = set(with_default if overridable is None else overridable)
        self.inputs = [entry.name for entry in graph.input if entry.name not in self.constants]
        self.outputs = [entry.name for entry in graph.output]
        self.types: dict[str, TypeProto] = {}

    @classmethod
    def of_file(cls, path: str, overridable: Iterable[str] | None = None) -> Model:
        """Return the model in a file, whose external data are mapped and read when needed."""
        return cls(read_proto(Path(path)), str(Path(path).parent), overridable)

    def infer_types(self, other_types: TypesOf) -> None:
        """Set `types`, and declare types in the graph and its bodies.

        `other_types` infers those that ONNX cannot infer.
        """
        graph = infer_shapes(self.proto).graph
        self.proto.graph.CopyFrom(graph)
        self.types = types_in(graph)
        computed_names = [name for node in graph.node for name in node.output if name]
        untyped_names = [name for name in computed_names if not is_typed(self.types.get(name))]
        if untyped_names:
            self.types.update(other_types(self.proto, untyped_names, self.constants))
        self._infer_in_bodies(self.proto.graph, self.types, other_types)

    def _infer_in_bodies(
        self, graph: GraphProto, outer_types: Mapping[str, TypeProto], other_types: TypesOf
    ) -> None:
        """Add types to the untyped values in the bodies of a graph, as far as `other_types` infers them.

        outer_types: of the values of the graph and the graphs around.
        """
        for node in graph.node:
            for body in bodies_of(node):
                types = {**outer_types, **types_in(body)}
                computed_names = [name for inner_node in body.node for name in inner_node.output if name]
                untyped_names = [name for name in computed_names if not is_typed(types.get(name))]
                if untyped_names:
                    inferred_types = other_types(
                        self._model_of_body(body, types), untyped_names, self.constants
                    )
                    body.value_info.extend(
                        ValueInfoProto(name=name, type=type) for name, type in inferred_types.items()
                    )
                    types.update(inferred_types)
                self._infer_in_bodies(body, types, other_types)

    def _model_of_body(self, body: GraphProto, types: Mapping[str, TypeProto]) -> ModelProto:
        """Return a model of a body, without outputs.

        Values that it reads of graphs around are inputs, or initializers.
        """
        model = ModelProto(ir_version=self.proto.ir_version, opset_import=self.proto.opset_import)
        model.graph.name = "body"
        model.graph.node.extend(body.node)
        model.graph.initializer.extend(body.initializer)
        model.graph.input.extend(body.input)
        initializers = {tensor.name: tensor for tensor in self.proto.graph.initializer}
        for name in dict.fromkeys(names_captured(body)):
            if name in initializers:
                model.graph.initializer.append(initializers[name])
            elif name in types:
                model.graph.input.append(ValueInfoProto(name=name, type=types[name]))
        return model

    def symbol(self, name: str) -> OnnxSymbol:
        """Return a new symbol of a value of the outermost graph.

        A value with a default, which a run may override, has the initializer's value as its default alone.
        """
        constant = self.constants.get(name)
        type = self.types.get(name)
        if constant is None:
            return OnnxSymbol(name, type)
        type = type if is_typed(type) else tensor_type(constant.dtype, constant.shape)
        if name in self.overridable:
            return OnnxSymbol(name, type, default=constant, root=name)
        return OnnxSymbol(name, type, constant, root=name)

    def _copy_without_values(self, proto: ModelProto, folder: str) -> ModelProto:
        """Copy a model, without large values; store the values of all its initializers in `constants`.

        Negative extents are cleared.
        """
        model = ModelProto()
        model.CopyFrom(proto)
        forget_negative_extents(model.graph)
        for tensor in model.graph.initializer:
            self.constants[tensor.name] = array = array_of(tensor, folder)
            # Without large values a model stays below the 2 GB of protocol buffers, and sessions share the
            # arrays.
            if array.nbytes > SMALL and is_shared(array):
                move_values_out(tensor)
        for sparse_tensor in model.graph.sparse_initializer:
            self.constants[sparse_tensor.values.name] = dense_array(sparse_tensor)
        return model


def read_proto(path: Path) -> ModelProto:
    """Read a model without its external data.

    Raises ArtefactError if external data are not in regular files in the model's folder; none is read.
    """
    proto = onnx.load(path, load_external_data=False)
    sparse_parts = (
        part for entry in proto.graph.sparse_initializer for part in (entry.values, entry.indices)
    )
    # The public helpers of ONNX load the data; only the private one lists the tensors, without the sparse
    # ones.
    for tensor in (*external_data_helper._get_all_tensors(proto), *sparse_parts):
        if external_data_helper.uses_external_data(tensor):
            file_beside(path, ExternalDataInfo(tensor).location, f"the data of {tensor.name}")
    return proto


def array_of(tensor: TensorProto, folder: str = "") -> Array:
    """Return a tensor's values as a read-only array; external data are mapped from their file."""
    if tensor.data_location == TensorProto.EXTERNAL:
        array = _map_external(tensor, folder)
    else:
        array = np.asarray(numpy_helper.to_array(tensor))
    array.flags.writeable = False
    return array


def dense_array(tensor: SparseTensorProto) -> Array:
    """Return the values of a sparse tensor as a read-only array."""
    values, indices = numpy_helper.to_array(tensor.values), numpy_helper.to_array(tensor.indices)
    array = np.zeros(tuple(tensor.dims), values.dtype)
    # ONNX stores indices flat, or as rows of coordinates.
    coordinates = np.unravel_index(indices, array.shape) if indices.ndim == 1 else tuple(indices.T)
    array[coordinates] = values
    array.flags.writeable = False
    return array


def _map_external(tensor: TensorProto, folder: str) -> Array:
    """Map an external tensor from its file; read it if NumPy cannot map its dtype."""
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    # NumPy cannot map strings, subbyte elements or empty arrays.
    if dtype.kind not in "fiub" or not prod(tensor.dims):
        return np.array(numpy_helper.to_array(tensor, folder))
    data_info = ExternalDataInfo(tensor)
    path = Path(folder, data_info.location)
    # Mapped values take no memory until they are read.
    return np.memmap(path, dtype, "r", data_info.offset or 0, tuple(tensor.dims))


def is_shared(array: Array) -> bool:
    """Return True if sessions can use an array without a copy."""
    return array.dtype.kind in "fiub" and array.dtype.type.__module__ == "numpy"


def move_values_out(tensor: TensorProto) -> None:
    """Remove the values from an initializer; a session gets them as external values."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    # ONNX Runtime looks the values up by the initializer's name; the location is never opened.
    tensor.external_data.add(key="location", value="in memory")


def initializer_of(name: str, array: Array) -> TensorProto:
    """Return an initializer of an array; a large one lacks its values, which sessions get externally."""
    if array.nbytes <= SMALL or not is_shared(array):
        return numpy_helper.from_array(np.asarray(array), name)
    element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=element, dims=array.shape)
    move_values_out(tensor)
    return tensor


def constant_of(node: onnx.NodeProto, folder: str = "") -> Array | None:
    """Return the value of a Constant node; None for other nodes, and for values that are sparse or text.

    folder: the folder with the external data of the model.
    """
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    value: Any = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return array_of(value, folder)
    dtype = _CONSTANT_DTYPES.get(attribute.name)
    return None if dtype is None else np.array(value, dtype)


_CONSTANT_DTYPES: dict[str, Any] = {
    "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64,
}  # fmt: skip


def infer_shapes(proto: ModelProto) -> ModelProto:
    """Return the model with the types that ONNX infers, or as it is where the inference fails."""
    try:
        # Data propagation infers shapes that other nodes compute.
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # declared types may contradict inferred ones, in a model that runs all the same
        return proto


def types_in(graph: GraphProto) -> dict[str, TypeProto]:
    """Return the types that a graph declares, by the name of the value."""
    declared_values = [*graph.value_info, *graph.output, *graph.input]
    types = {value.name: value.type for value in declared_values if value.HasField("type")}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def forget_negative_extents(graph: GraphProto) -> None:
    """Clear negative extents, by which some exporters mean an unknown extent, also in bodies."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.WhichOneof("value") == "tensor_type":
            for extent in value.type.tensor_type.shape.dim:
                if extent.dim_value < 0:
                    extent.ClearField("value")
    for node in graph.node:
        for body in bodies_of(node):
            forget_negative_extents(body)


def is_typed(type: TypeProto | None) -> bool:
    """Return True if a type is known, apart from its shape."""
    if type is None or type.WhichOneof("value") is None:
        return False
    return type.WhichOneof("value") != "tensor_type" or bool(type.tensor_type.elem_type)


def is_all_typed(graph: GraphProto) -> bool:
    """Return True if the types of all inputs and computed values of a graph are known."""
    types = types_in(graph)
    names = [value.name for value in graph.input]
    names += [name for node in graph.node for name in node.output if name]
    return all(is_typed(types.get(name)) for name in names)


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
    options = session_options()
    external_values = {
        tensor.name: onnxruntime.OrtValue.ortvalue_from_numpy(constants[tensor.name])
        for tensor in probe.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    if external_values:
        options.add_external_initializers(list(external_values), list(external_values.values()))
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # the error comes up again when the user loads the model
        return {}
    return output_types(session, names)


def add_outputs(graph: GraphProto, names: Sequence[str]) -> None:
    """Add values of these names to the outputs of a graph."""
    present_names = {output.name for output in graph.output}
    graph.output.extend(ValueInfoProto(name=name) for name in names if name not in present_names)


def output_types(session: Any, names: Sequence[str]) -> dict[str, TypeProto]:
    """Return the types of those of a session's outputs with these names that are tensors."""
    types = {output.name: _type_of_argument(output) for output in session.get_outputs()}
    return {name: type for name in names if (type := types.get(name)) is not None}


def _type_of_argument(argument: Any) -> TypeProto | None:
    """Return the type of a session's output; None if it is not a tensor."""
    match = _TENSOR.fullmatch(argument.type)
    if match is None or match[1] not in _ELEMENTS:
        return None
    element = onnx.TensorProto.DataType.Value(_ELEMENTS[match[1]])
    shape: list[Any] | None = None
    if argument.shape:  # ONNX Runtime reports a scalar like an unknown shape
        shape = [None if isinstance(extent, int) and extent < 0 else extent for extent in argument.shape]
    return onnx.helper.make_tensor_type_proto(element, shape)

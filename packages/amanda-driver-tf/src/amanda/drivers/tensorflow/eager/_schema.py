"""Schemas of ops in TensorFlow's registry: inputs, outputs, and how many tensors each has."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import EagerTensor

from .._operation import TensorFlowOperation

FUNCTION_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall", "RemoteCall"})
"""Ops that call a function; FunctionDriver instruments them."""

# TensorFlow's registry has no mark for ops that write; see `Schema.written`.
_WRITING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
"""Prefixes of the names of ops that write into variables."""


class Schema:
    """Inputs, outputs and attributes of a type of op.

    input_count: number of inputs.  takes_variable: True if an input is a variable's handle.
    has_functions: True if an attribute is a function, which native code runs.
    lists: for each input, True if it is a list of tensors.
    written: positions of the handles of the variables that the op writes into.
    """

    def __init__(self, op_def: Any) -> None:
        self.type: str = op_def.name
        # One object for all eager calls of the type, since a call has no node with a name.
        self.op = TensorFlowOperation(self.type)
        self.inputs = tuple(op_def.input_arg)
        self.outputs = tuple(op_def.output_arg)
        self.names = tuple(arg.name for arg in self.inputs)
        self.input_count = len(self.inputs)
        self.takes_variable = any(arg.type == tf.resource.as_datatype_enum for arg in self.inputs)
        handles = [i for i, arg in enumerate(self.inputs) if arg.type == tf.resource.as_datatype_enum]
        # An OpDef does not say which resources an op writes, but the names of writing ops follow a pattern.
        self.written = tuple(handles) if self.type.startswith(_WRITING) else ()
        self.has_functions = any(attr.type in ("func", "list(func)") for attr in op_def.attr)
        self.lists = tuple(bool(arg.number_attr or arg.type_list_attr) for arg in self.inputs)
        self._has_lists = any(self.lists)
        self._output_lists = tuple(bool(arg.number_attr or arg.type_list_attr) for arg in self.outputs)
        self._type_by_attribute = {attr.name: attr.type for attr in op_def.attr}
        self._default_by_attribute = {
            attr.name: attr.default_value for attr in op_def.attr if attr.HasField("default_value")
        }
        type_attrs = [attr for attr in op_def.attr if attr.type == "type"]
        self._default_types = {attr.name: attr.default_value.type for attr in type_attrs}

    def number_dtype_enum(self, index: int, inputs: Sequence[Any]) -> int:
        """Return the dtype that a number becomes as this input, or 0 if TensorFlow decides by other rules.

        It is the schema's dtype, or that of a tensor input with the same type attribute, or the default.
        """
        arg = self.inputs[index]
        if arg.type:
            return int(arg.type)
        for input_arg, value in zip(self.inputs, inputs, strict=True):
            if input_arg.type_attr == arg.type_attr:
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if tensor.__class__ is EagerTensor:
                        return int(tensor._datatype_enum())
        return int(self._default_types.get(arg.type_attr, 0))

    def with_defaults(self, attrs: Sequence[Any]) -> dict[str, Any]:
        """Return attributes by name, with the op's default where a value is None."""
        attributes = dict(zip(attrs[::2], attrs[1::2], strict=True))
        # Functions of tf.raw_ops pass None where the caller gave nothing, and native code takes the default.
        for name, value in attributes.items():
            if value is None and name in self._default_by_attribute:
                attributes[name] = attribute_value(self._default_by_attribute[name])
        return attributes

    def convert_attributes(self, attrs: Sequence[Any]) -> tuple[Any, ...]:
        """Return names and values of attributes in the forms that `execute` takes: "float32" as a DType, ...

        None becomes the default.  Raises TypeError, as TensorFlow does, for a value that has no such form.
        """
        converted_attrs: list[Any] = []
        for name, value in self.with_defaults(attrs).items():
            attribute_type = self._type_by_attribute.get(name, "")
            is_list = attribute_type.startswith("list(") and isinstance(value, (list, tuple))
            convert = _CONVERTERS.get(attribute_type.removeprefix("list(").removesuffix(")"))
            if convert is not None:
                value = [convert(element, name) for element in value] if is_list else convert(value, name)
            converted_attrs += [name, value]
        return tuple(converted_attrs)

    def group_inputs(self, tensors: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
        """Return flat tensors as the op's inputs, of which each may be a list of tensors."""
        return _group_tensors(self.inputs, tensors, attributes) if self._has_lists else list(tensors)

    def split_outputs(
        self, result: Any, attributes: Callable[[], dict[str, Any]]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return a result as a list of outputs, and a function that restores the result's form.

        Ops return a tensor, None, or a list; in it are tensors, or lists of tensors, or all tensors flat.
        attributes: called for a flat list alone; the lengths of lists are among the attributes.
        """
        if isinstance(result, EagerTensor):
            return [result], _only_output
        if result is None:
            return [], _no_output
        if not any(self._output_lists):
            return list(result), list
        if len(self.outputs) == 1:
            return [list(result)], _only_output
        if any(isinstance(output, (list, tuple)) for output in result):
            return list(result), list
        return self.group_outputs(result, attributes), flatten

    def group_outputs(self, tensors: Sequence[Any], attributes: Callable[[], dict[str, Any]]) -> list[Any]:
        """Return flat tensors as the op's outputs, of which each may be a list of tensors."""
        return (
            _group_tensors(self.outputs, tensors, attributes()) if any(self._output_lists) else list(tensors)
        )

    def infer_attributes(self, inputs: Sequence[Any], explicit: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes that follow from the inputs, and are not explicit: DTypes, list lengths."""
        attributes: dict[str, Any] = {}
        for arg, value in zip(self.inputs, inputs, strict=True):
            tensors = value if isinstance(value, (list, tuple)) else (value,)
            if arg.number_attr:
                attributes[arg.number_attr] = len(tensors)
            if arg.type_list_attr:
                attributes[arg.type_list_attr] = [tensor.dtype for tensor in tensors]
            elif arg.type_attr and tensors:
                attributes[arg.type_attr] = tensors[0].dtype
        return {name: value for name, value in attributes.items() if name not in explicit}


def attribute_value(attribute: Any) -> Any:
    """Return an AttrValue in the form for `execute`: a string, number, dtype or shape, or a list of these."""
    field_name = attribute.WhichOneof("value")
    if field_name == "list":
        set_fields = attribute.list.ListFields()  # one, for the type of the elements; none in an empty list
        if not set_fields:
            return []
        ((field, values),) = set_fields
        return [_field_value(field.name, value) for value in values]
    return _field_value(field_name, getattr(attribute, field_name))


def _field_value(field_name: str, value: Any) -> Any:
    """Return one value of an AttrValue's field: bytes as text, types and shapes as `execute` takes them."""
    if field_name == "s":
        return value.decode("utf-8", "surrogateescape")
    if field_name == "type":
        return tf.as_dtype(value)
    return execute.make_shape(value, "shape") if field_name == "shape" else value


_CONVERTERS: dict[str, Callable[[Any, str], Any]] = {
    "bool": execute.make_bool,
    "float": execute.make_float,
    "int": execute.make_int,
    "shape": execute.make_shape,
    "string": execute.make_str,
    "type": lambda value, name: tf.as_dtype(execute.make_type(value, name)),
}


class Schemas(dict[str, Schema | None]):
    """Schemas by type of op; None for the name of a function, and for ops that call functions."""

    def __missing__(self, type: str) -> Schema | None:
        """Return the schema of an op at its first use; None for the name of a function, or a call of one."""
        op_def = None if type in FUNCTION_CALLS else op_def_registry.get(type)
        schema = None if op_def is None else Schema(op_def)
        if op_def is not None or type in FUNCTION_CALLS:
            self[type] = schema  # a function's name is not cached, since functions come and go
        return schema


def flatten(values: Sequence[Any]) -> list[Any]:
    """Return the values, with each list replaced by its elements; a hot path."""
    for value in values:
        value_class = value.__class__
        if value_class is list or value_class is tuple:
            break
    else:
        return list(values)
    flat: list[Any] = []
    for value in values:
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    return flat


def _group_tensors(args: Sequence[Any], tensors: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
    """Return flat tensors by argument: a list for an argument whose length is an attribute."""
    grouped_tensors: list[Any] = []
    position = 0
    for arg in args:
        if arg.number_attr or arg.type_list_attr:
            size = attributes[arg.number_attr] if arg.number_attr else len(attributes[arg.type_list_attr])
            grouped_tensors.append(list(tensors[position : position + size]))
            position += size
        else:
            grouped_tensors.append(tensors[position])
            position += 1
    return grouped_tensors


def _only_output(values: list[Any]) -> Any:
    return values[0]


def _no_output(values: list[Any]) -> None:
    return None

"""Schemas of ops in TensorFlow's registry: inputs, outputs, and how many tensors each has."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.ops import EagerTensor

from .._operation import Operation

FUNCTION_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall", "RemoteCall"})
"""Ops that call a function: the function's own driver has them."""

_WRITING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
"""How the names of ops begin that write into variables."""


class Schema:
    """One type of op.

    count: how many inputs it has.  takes_variable: whether one of them is a variable's handle.
    has_functions: whether it takes functions, which run in native code.
    written: positions of the handles of the variables that it writes into.
    """

    def __init__(self, op_def: Any) -> None:
        self.type: str = op_def.name
        self.op = Operation(self.type)
        self.inputs = tuple(op_def.input_arg)
        self.outputs = tuple(op_def.output_arg)
        self.names = tuple(arg.name for arg in self.inputs)
        self.count = len(self.inputs)
        self.takes_variable = any(arg.type == tf.resource.as_datatype_enum for arg in self.inputs)
        handles = [i for i, arg in enumerate(self.inputs) if arg.type == tf.resource.as_datatype_enum]
        self.written = tuple(handles) if self.type.startswith(_WRITING) else ()
        self.has_functions = any(attr.type in ("func", "list(func)") for attr in op_def.attr)
        self.lists = tuple(bool(arg.number_attr or arg.type_list_attr) for arg in self.inputs)
        self._has_lists = any(self.lists)
        self._output_lists = tuple(bool(arg.number_attr or arg.type_list_attr) for arg in self.outputs)
        self._kinds = {attr.name: attr.type for attr in op_def.attr}
        self._defaults = {
            attr.name: attr.default_value for attr in op_def.attr if attr.HasField("default_value")
        }
        self._types = {attr.name: attr.default_value.type for attr in op_def.attr if attr.type == "type"}

    def type_of(self, index: int, inputs: Sequence[Any]) -> int:
        """The element type that TensorFlow gives a number at this input; 0 where another way decides.

        It is the op's own, or that of a tensor of the same type among the inputs, or a default.
        """
        arg = self.inputs[index]
        if arg.type:
            return int(arg.type)
        for other, value in zip(self.inputs, inputs, strict=True):
            if other.type_attr == arg.type_attr:
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    if one.__class__ is EagerTensor:
                        return int(one._datatype_enum())
        return int(self._types.get(arg.type_attr, 0))

    def completed(self, attrs: Sequence[Any]) -> dict[str, Any]:
        """Return attributes by name, with the op's default where a value is None."""
        given = dict(zip(attrs[::2], attrs[1::2], strict=True))
        for name, value in given.items():
            if value is None and name in self._defaults:
                given[name] = attribute_value(self._defaults[name])
        return given

    def converted(self, attrs: Sequence[Any]) -> tuple[Any, ...]:
        """Attributes by name and value, each as `execute` wants it: "float32" as a type, and so on.

        Raises TypeError for a value of another kind, as TensorFlow does.
        """
        converted: list[Any] = []
        for name, value in self.completed(attrs).items():
            kind = self._kinds.get(name, "")
            several = kind.startswith("list(") and isinstance(value, (list, tuple))
            make = _MAKERS.get(kind.removeprefix("list(").removesuffix(")"))
            if make is not None:
                value = [make(one, name) for one in value] if several else make(value, name)
            converted += [name, value]
        return tuple(converted)

    def grouped_inputs(self, tensors: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
        """A flat list of tensors as the op's inputs: a list-of-tensors argument is one."""
        return _grouped(self.inputs, tensors, attributes) if self._has_lists else list(tensors)

    def output_form(
        self, result: Any, attributes: Callable[[], dict[str, Any]]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An op's result as a list of outputs, and how to put such a list back into its form."""
        if isinstance(result, EagerTensor):
            return [result], _only
        if result is None:
            return [], _nothing
        if not any(self._output_lists):
            return list(result), list
        if len(self.outputs) == 1:
            return [list(result)], _only
        if any(isinstance(one, (list, tuple)) for one in result):
            return list(result), list
        return self.grouped_outputs(result, attributes), flattened

    def grouped_outputs(self, tensors: Sequence[Any], attributes: Callable[[], dict[str, Any]]) -> list[Any]:
        """A flat list of tensors as the op's outputs: one that is a list of tensors is one."""
        return _grouped(self.outputs, tensors, attributes()) if any(self._output_lists) else list(tensors)

    def inferred(self, inputs: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        """The attributes that follow from the inputs: types as `tf.DType`, and numbers of tensors."""
        found: dict[str, Any] = {}
        for arg, value in zip(self.inputs, inputs, strict=True):
            tensors = value if isinstance(value, (list, tuple)) else (value,)
            if arg.number_attr:
                found[arg.number_attr] = len(tensors)
            if arg.type_list_attr:
                found[arg.type_list_attr] = [one.dtype for one in tensors]
            elif arg.type_attr and tensors:
                found[arg.type_attr] = tensors[0].dtype
        return {name: value for name, value in found.items() if name not in given}


def attribute_value(attribute: Any) -> Any:
    """Return the value of an AttrValue as `execute` takes it: a text, a number, a type, a list of these."""
    kind = attribute.WhichOneof("value")
    if kind == "list":
        (field,) = [field for field, _ in attribute.list.ListFields()] or [None]
        values = [] if field is None else getattr(attribute.list, field.name)
        return [_plain(field.name, value) for value in values]
    return _plain(kind, getattr(attribute, kind))


def _plain(kind: str, value: Any) -> Any:
    """Return one value of an AttrValue's field."""
    if kind == "s":
        return value.decode("utf-8", "surrogateescape")
    if kind == "type":
        return tf.as_dtype(value)
    return execute.make_shape(value, "shape") if kind == "shape" else value


_MAKERS: dict[str, Callable[[Any, str], Any]] = {
    "bool": execute.make_bool,
    "float": execute.make_float,
    "int": execute.make_int,
    "shape": execute.make_shape,
    "string": execute.make_str,
    "type": lambda value, name: tf.as_dtype(execute.make_type(value, name)),
}


class Schemas(dict[str, Schema | None]):
    """Schemas by type of op; None for a function's name and for what calls functions."""

    def __missing__(self, type: str) -> Schema | None:
        op_def = None if type in FUNCTION_CALLS else op_def_registry.get(type)
        schema = None if op_def is None else Schema(op_def)
        if op_def is not None or type in FUNCTION_CALLS:
            self[type] = schema  # functions come and go
        return schema


def flattened(values: Sequence[Any]) -> list[Any]:
    """Values, each list among them as its elements; a hot path."""
    for value in values:
        kind = value.__class__
        if kind is list or kind is tuple:
            break
    else:
        return list(values)
    flat: list[Any] = []
    for value in values:
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    return flat


def _grouped(args: Sequence[Any], tensors: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
    grouped: list[Any] = []
    position = 0
    for arg in args:
        if arg.number_attr or arg.type_list_attr:
            size = attributes[arg.number_attr] if arg.number_attr else len(attributes[arg.type_list_attr])
            grouped.append(list(tensors[position : position + size]))
            position += size
        else:
            grouped.append(tensors[position])
            position += 1
    return grouped


def _only(values: list[Any]) -> Any:
    return values[0]


def _nothing(values: list[Any]) -> None:
    return None

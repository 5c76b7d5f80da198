"""Facts of an operation of a graph that tools see: its variables and tensors, and its eager computation."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from google.protobuf.json_format import MessageToDict

import tensorflow as tf
from amanda.backend import Namespace, OpFacts, Reads, TensorOps, dtype_error
from amanda.errors import RoutineError
from tensorflow.python.framework import dtypes, tensor_util

from .._operation import TensorFlowOperation
from .._tensors import EagerTensorOps, cast_like
from ._locations import Location
from ._nodes import input_sizes
from ._sides import group_tensors, inputs_of

_SITE_PACKAGES = Path(tf.__file__).parent.parent
_FRAMEWORK = (
    f"{_SITE_PACKAGES / 'tensorflow'}/",
    f"{_SITE_PACKAGES / 'keras'}/",
    f"{_SITE_PACKAGES / 'tf_keras'}/",
    f"{Path(__file__).parent.parent}/",
    threading.__file__,  # replicas are traced on threads of their own
)


def facts_of(
    op: tf.Operation,
    op_id: int,
    namespace: Namespace,
    read_value: Callable[[Any], Any] = lambda tensor: tensor,
    node: Any = None,
    graph: Hashable = None,
    variable_of: Callable[[Any], Any] = lambda tensor: None,
    location: Location | None = None,
) -> OpFacts:
    """Return the facts of an operation.

    read_value: returns the present value of a tensor.  graph: the identity of the operation's body.
    variable_of: returns the holder of the variable of an input.
    node: its NodeDef, if the operation's differs: TensorFlow adds outputs to calls of functions that it
    differentiates.
    location: the layer around the operation; the name scope by default.
    """
    location = location or Location.outside(op)
    node = op.node_def if node is None else node
    layout = input_sizes(node)  # name and length of each input
    return OpFacts(
        TensorFlowOperation(op.type, op.name, op), op_id, namespace, [name for name, _ in layout],
        group_tensors(inputs_of(op, node), layout),
        attributes=NodeAttributes(node), scope=location.scope, source=source_line(op), read_value=read_value,
        op_type=op.type, graph=graph, read_variables=partial(variables_of, op, read_value),
        original=partial(eager_computation, op),
        variable_of=lambda value: variable_of(value) if isinstance(value, tf.Tensor) else None,
        device_of=lambda value: getattr(value, "device", None) or "", scope_aliases=location.aliases,
    )  # fmt: skip


# Keras' attention casts, reshapes or transposes a weight ahead of its product: the weight is found behind
# these operations, too.
VALUE_FORWARDING = frozenset(
    {"Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Switch", "Reshape", "Transpose"}
)
"""Operations whose result is the value of their first input, cast or rearranged."""
VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})


def variable_of(tensor: Any, argument_variable: Callable[[Any], Any] = lambda placeholder: None) -> Any:
    """Return the handle or tensor of the variable that a symbol was read from; None for others.

    Operations in `VALUE_FORWARDING` may lie between.
    argument_variable: returns the variable that a placeholder stands for.
    """
    while tensor.op.type in VALUE_FORWARDING:
        tensor = tensor.op.inputs[0]
    if tensor.op.type in VARIABLES:
        return tensor
    return argument_variable(tensor) if tensor.op.type == "Placeholder" else None


def variables_of(op: tf.Operation, read_value: Callable[[Any], Any]) -> Hashable:
    """Return the variables that an operation reads: ids of their handles, or their names in a graph.

    None for a resource whose handle is unknown.
    """
    variables = []
    for tensor in op.inputs:
        while tensor.op.type in VALUE_FORWARDING:
            tensor = tensor.op.inputs[0]
        if tensor.op.type in VARIABLES:
            variables.append(tensor.op.name)
        elif tensor.dtype == tf.resource:
            variables.append(getattr(read_value(tensor), "_id", None))
    return tuple(variables)


def source_line(op: tf.Operation) -> str:
    """Return "file:line" of the user's line that created an operation; "" if TensorFlow knows none."""
    try:
        frames = op.traceback
        frame_count = len(frames)
    except Exception:  # an operation without one
        return ""
    for i in range(frame_count - 1, -1, -1):  # indexing creates a frame; iteration would create all of them
        frame = frames[i]
        if not frame.filename.startswith(_FRAMEWORK):
            return f"{frame.filename}:{frame.lineno}"
    return ""


class NodeAttributes(Mapping[str, Any]):
    """The attributes of a node as Python values, converted when they are read.

    Iteration leaves out TensorFlow's own attributes, which begin with an underscore.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getitem__(self, name: str) -> Any:
        if name not in self._node.attr:
            raise KeyError(name)
        return python_value(self._node.attr[name])

    def __iter__(self) -> Iterator[str]:
        # Attributes with an underscore, such as `_class` and `_output_shapes`, are notes of TensorFlow
        # itself.
        return (name for name in self._node.attr if not name.startswith("_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def python_value(attribute: Any) -> Any:
    """Return an AttrValue as a dtype, a shape, an array, text, a number, or a list; None if empty.

    Bytes that are no text stay bytes; a function is returned as a dict.
    """
    field_name = attribute.WhichOneof("value")
    if field_name is None:
        return None
    value = getattr(attribute, field_name)
    if field_name == "list":
        # A list has a field for each type of elements.
        return [
            _python_scalar(field.name, element)
            for field, elements in value.ListFields()
            for element in elements
        ]
    return _python_scalar(field_name, value)


def _python_scalar(field_name: str, value: Any) -> Any:
    """Convert a value of an AttrValue's field to a Python value; see `python_value`."""
    if field_name == "type":
        return dtypes.as_dtype(value)
    if field_name == "shape":
        return tf.TensorShape(value)
    if field_name == "tensor":
        return tensor_util.MakeNdarray(value)
    if field_name == "s":
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return MessageToDict(value) if field_name == "func" else value


def eager_computation(op: tf.Operation) -> Callable[[Sequence[Any]], Any]:
    """Return a function that computes an operation eagerly from its inputs, with its attributes."""
    op_type, definition = op.type, op.op_def
    # The eager op finds these from its inputs: types, and the lengths and types of lists.
    inferred_names = {
        name
        for argument in definition.input_arg
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }
    # The attributes are read at once: the function is called when the graph may be gone.
    attributes = {
        attribute.name: op.get_attr(attribute.name)
        for attribute in definition.attr
        if attribute.name not in inferred_names
    }
    input_names = [argument.name for argument in definition.input_arg]

    def compute(inputs: Sequence[Any]) -> Any:
        """Return the outputs; raise RoutineError for an op without function, or a wrong number of inputs."""
        function = getattr(tf.raw_ops, op_type, None)
        if function is None:
            raise RoutineError(f"{op_type} cannot be computed by itself: it is no op of tf.raw_ops")
        if len(inputs) != len(input_names):
            raise RoutineError(
                f"{op_type} takes {len(input_names)} inputs ({', '.join(input_names)}), not {len(inputs)}"
            )
        arguments = {**dict(zip(input_names, inputs, strict=True)), **attributes}
        python_name_by_name = _python_names(function, list(arguments))
        return function(**{python_name_by_name.get(name, name): value for name, value in arguments.items()})

    return compute


def _python_names(function: Callable[..., Any], names: Sequence[str]) -> dict[str, str]:
    """Return Python's names of the arguments that have other names in TensorFlow's OpDef, by these names."""
    # Both lists are in the order of the OpDef, so those names that differ pair up.
    parameters = [name for name in inspect.signature(function).parameters if name != "name"]
    op_def_only = [name for name in names if name not in parameters]
    python_only = [name for name in parameters if name not in names]
    return dict(zip(op_def_only, python_only, strict=False))


class GraphTensorOps(EagerTensorOps, TensorOps):
    """Tensor primitives for graphs, where routines run outside of every tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, symbolic or not."""
        return isinstance(value, tf.Tensor)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each tensor, including tensors in lists."""
        return tuple([_signature(value) for value in inputs])

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the dtype of `original`.  Raises RoutineError for another shape or kind."""
        value, dtype = cast_like(original, value), original.dtype
        # Nodes that read the tensor were created for its dtype. `cast_like` casts floating types alone.
        if value.dtype != dtype:
            raise dtype_error(value.dtype.name, dtype.name, "return that type")
        return value

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raise RoutineError: no operation of TensorFlow writes into tensors."""
        raise RoutineError("a TensorFlow tensor cannot be written")

    def differentiable_copy(self, value: Any) -> Any:
        """Return the value itself, since tensors are immutable."""
        return value


def _signature(value: Any) -> Hashable:
    """Return dtype and rank of a tensor, those of each tensor of a list, None for another value."""
    if isinstance(value, tf.Tensor):
        return (value.dtype.as_datatype_enum, value.shape.rank)
    return tuple([_signature(element) for element in value]) if isinstance(value, list) else None


class TensorFlowReads(Reads):
    """Reads with the plain values of TensorFlow and NumPy, and with the layers of Keras."""

    plain_types: ClassVar = (*Reads.plain_types, tf.DType, tf.TensorShape, np.dtype, np.generic)
    opaque_packages: ClassVar = Reads.opaque_packages | {"tensorflow", "keras", "tf_keras"}
    # A layer's `__call__` is code of Keras, which is opaque; it calls the user's `call`.
    implicit_methods: ClassVar = (*Reads.implicit_methods, "call")

    def follows_attributes(self, value: Any) -> bool:
        """Return True if routines read a value's attributes; of a framework's objects, those of layers."""
        return super().follows_attributes(value) or hasattr(type(value), "call")

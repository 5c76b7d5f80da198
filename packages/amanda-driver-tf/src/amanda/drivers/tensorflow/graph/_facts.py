"""Facts of an operation of a graph for tools, and its eager computation for replacements."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

import tensorflow as tf
from amanda.backend import Namespace, OpFacts
from amanda.errors import RoutineError
from tensorflow.python.framework import dtypes, tensor_util

from .._operation import TensorFlowOperation
from ._locations import Location
from ._nodes import input_sizes, op_def, output_sizes
from ._values import VALUE_FORWARDING, VARIABLES

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
    place: Location | None = None,
) -> OpFacts:
    """Return the facts of an operation.

    graph: the identity of its body.  variable_of: returns the holder of the variable of an input.
    node: its NodeDef, if the operation's differs: TensorFlow adds outputs to calls of functions that it
    differentiates.
    place: the layer around the operation; the name scope by default.
    """
    place = place or Location.outside(op)
    node = op.node_def if node is None else node
    layout = input_sizes(node)
    return OpFacts(
        TensorFlowOperation(op.type, op.name, op), op_id, namespace, [name for name, _ in layout],
        group_tensors(inputs_of(op, node), layout),
        attributes=NodeAttributes(node), scope=place.scope, source=source_line(op), read_value=read_value,
        op_type=op.type, graph=graph, read_variables=partial(variables_of, op, read_value),
        original=partial(eager_computation, op),
        variable_of=lambda value: variable_of(value) if isinstance(value, tf.Tensor) else None,
        device_of=lambda value: getattr(value, "device", None) or "", aliases=place.aliases,
    )  # fmt: skip


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


def inputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic inputs that a NodeDef of an operation has."""
    return list(op.inputs)[: sum(not text.startswith("^") for text in node.input)]


def outputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic outputs that a NodeDef of an operation has."""
    total = sum(1 if size is None else size for _, size in output_sizes(node))
    return list(op.outputs)[:total] if op_def(node.op) is not None else list(op.outputs)


def grouped_outputs(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic outputs that a NodeDef of an operation has, each a tensor or a list."""
    return group_tensors(outputs_of(op, node), output_sizes(node))


def group_tensors(flat: Sequence[Any], layout: Sequence[tuple[str, int | None]]) -> list[Any]:
    """Return flat tensors as values, each a tensor or a list.

    layout: name and length of each value; None as the length of a single tensor.  The tensors are returned
    as they are if their number is another, as for a function that is called by its name.
    """
    if sum(1 if size is None else size for _, size in layout) != len(flat):
        return list(flat)
    tensors = iter(flat)
    return [next(tensors) if size is None else [next(tensors) for _ in range(size)] for _, size in layout]


def source_line(op: tf.Operation) -> str:
    """Return "file:line" of the user's line that created an operation; "" where TensorFlow lacks it."""
    try:
        frames = op.traceback
        count = len(frames)
    except Exception:  # an operation without one
        return ""
    for i in range(count - 1, -1, -1):  # indexing creates a frame; iteration would create all of them
        frame = frames[i]
        if not frame.filename.startswith(_FRAMEWORK):
            return f"{frame.filename}:{frame.lineno}"
    return ""


class NodeAttributes(Mapping[str, Any]):
    """The attributes of a node as Python values, converted when they are read."""

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
    """Return an AttrValue as a dtype, a shape, an array, text, a number, or a list of these."""
    kind = attribute.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attribute, kind)
    if kind == "list":
        fields = [(field.name, items) for field, items in value.ListFields()]
        return [_python_scalar(name, item) for name, items in fields for item in items]
    return _python_scalar(kind, value)


def _python_scalar(kind: str, value: Any) -> Any:
    """Convert a value of an AttrValue's field to a Python value."""
    if kind == "type":
        return dtypes.as_dtype(value)
    if kind == "shape":
        return tf.TensorShape(value)
    if kind == "tensor":
        return tensor_util.MakeNdarray(value)
    if kind == "s":
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return MessageToDict(value) if kind == "func" else value


def eager_computation(op: tf.Operation) -> Callable[[Sequence[Any]], Any]:
    """Return a function that computes an operation eagerly from its inputs, with its attributes."""
    kind, definition = op.type, op.op_def
    # The eager op finds these from its inputs: types, and the lengths and types of lists.
    inferred = {
        name
        for argument in definition.input_arg
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }
    # The attributes are read at once: the function is called when the graph may be gone.
    attributes = {
        attribute.name: op.get_attr(attribute.name)
        for attribute in definition.attr
        if attribute.name not in inferred
    }
    names = [argument.name for argument in definition.input_arg]

    def compute(inputs: Sequence[Any]) -> Any:
        """Return the outputs; raise RoutineError for an op without a function, or other than its inputs."""
        function = getattr(tf.raw_ops, kind, None)
        if function is None or len(inputs) != len(names):
            raise RoutineError(
                f"{kind} cannot be computed by itself: it is no op of tf.raw_ops"
                if function is None
                else f"{kind} takes {len(names)} inputs ({', '.join(names)}), not {len(inputs)}"
            )
        arguments = {**dict(zip(names, inputs, strict=True)), **attributes}
        python_names = _python_names(function, list(arguments))
        return function(**{python_names.get(name, name): value for name, value in arguments.items()})

    return compute


def _python_names(function: Callable[..., Any], names: Sequence[str]) -> dict[str, str]:
    """Return Python's names of the arguments that have other names in TensorFlow's OpDef."""
    # Both lists are in the order of the OpDef, so those names that differ pair up.
    parameters = [name for name in inspect.signature(function).parameters if name != "name"]
    renamed = [name for name in names if name not in parameters]
    python_only = [name for name in parameters if name not in names]
    return dict(zip(renamed, python_only, strict=False))

"""Facts of an operation of a graph, for tools."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

import tensorflow as tf
from amanda.backend import Namespace, OpFacts
from tensorflow.python.framework import dtypes, tensor_util

from .._operation import Operation
from ._locations import Location
from ._original import original
from ._syntax import input_sizes, op_def, output_sizes
from ._values import PASSING, VARIABLES

_SITE = Path(tf.__file__).parent.parent
_FRAMEWORK = (
    f"{_SITE / 'tensorflow'}/",
    f"{_SITE / 'keras'}/",
    f"{_SITE / 'tf_keras'}/",
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
    """Facts of an operation.

    graph: the identity of its body.  variable_of: what holds the variable that an input was read of.
    node: its NodeDef, if that is another than the operation's own: TensorFlow adds outputs to calls of
    functions that it differentiates.
    place: the layer that the operation lies in; its name scope by default.
    """
    place = place or Location.outside(op)
    node = op.node_def if node is None else node
    layout = input_sizes(node)
    return OpFacts(
        Operation(op.type, op.name, op), op_id, namespace, [name for name, _ in layout],
        grouped(inputs_of(op, node), layout),
        attributes=Attributes(node), scope=place.scope, source=source(op), read_value=read_value,
        op_type=op.type, graph=graph, read_variables=partial(variables_of, op, read_value),
        original=partial(original, op),
        variable_of=lambda value: variable_of(value) if isinstance(value, tf.Tensor) else None,
        device_of=lambda value: getattr(value, "device", None) or "", aliases=place.aliases,
    )  # fmt: skip


def variables_of(op: tf.Operation, read_value: Callable[[Any], Any]) -> Hashable:
    """The variables that an operation reads: the ids of their handles, or their names in a graph."""
    found = []
    for tensor in op.inputs:
        while tensor.op.type in PASSING:
            tensor = tensor.op.inputs[0]
        if tensor.op.type in VARIABLES:
            found.append(tensor.op.name)
        elif tensor.dtype == tf.resource:
            found.append(getattr(read_value(tensor), "_id", None))
    return tuple(found)


def inputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """The symbolic inputs that a NodeDef of an operation has."""
    return list(op.inputs)[: sum(not text.startswith("^") for text in node.input)]


def outputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """The symbolic outputs that a NodeDef of an operation has."""
    total = sum(1 if size is None else size for _, size in output_sizes(node))
    return list(op.outputs)[:total] if op_def(node.op) is not None else list(op.outputs)


def grouped_outputs(op: tf.Operation, node: Any) -> list[Any]:
    """The symbolic outputs that a NodeDef of an operation has, each a tensor or a list."""
    return grouped(outputs_of(op, node), output_sizes(node))


def grouped(flat: Sequence[Any], layout: Sequence[tuple[str, int | None]]) -> list[Any]:
    """Flat tensors as values: single ones, and lists; layout: the name and size of each."""
    if sum(1 if size is None else size for _, size in layout) != len(flat):
        return list(flat)
    tensors = iter(flat)
    return [next(tensors) if size is None else [next(tensors) for _ in range(size)] for _, size in layout]


def source(op: tf.Operation) -> str:
    """ "file:line" of the user's line that made an operation; "" where TensorFlow does not know it."""
    try:
        frames = op.traceback
        count = len(frames)
    except Exception:  # an operation without one
        return ""
    for i in range(count - 1, -1, -1):  # a frame is made when it is asked for
        frame = frames[i]
        if not frame.filename.startswith(_FRAMEWORK):
            return f"{frame.filename}:{frame.lineno}"
    return ""


class Attributes(Mapping[str, Any]):
    """A node's attributes, in Python's terms when they are asked for."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getitem__(self, name: str) -> Any:
        if name not in self._node.attr:
            raise KeyError(name)
        return python_value(self._node.attr[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._node.attr if not name.startswith("_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def python_value(attribute: Any) -> Any:
    """An attribute as Python has it: a dtype, a shape, an array, text, a number, or a list of those."""
    kind = attribute.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attribute, kind)
    if kind == "list":
        fields = [(field.name, items) for field, items in value.ListFields()]
        return [_single(name, one) for name, items in fields for one in items]
    return _single(kind, value)


def _single(kind: str, value: Any) -> Any:
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

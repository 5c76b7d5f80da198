"""NodeDefs that the engine adds to graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, tensor_shape_pb2
from tensorflow.python.framework import tensor_util

INT64 = tf.int64.as_datatype_enum


def new_node(name: str, op: str, inputs: Iterable[str] = (), N: int = 0, **types: int) -> Any:
    """Return a node.  N: length of a list among its inputs.  types: dtype enums by attribute."""
    node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute, value in types.items():
        node.attr[attribute].type = value
    if N:
        node.attr["N"].i = N
    return node


def constant(name: str, value: Any, control_inputs: Iterable[str] = ()) -> Any:
    """Return a Const node, in the loop frame of its control inputs."""
    node = new_node(name, "Const", control_inputs)
    node.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return node


def opaque_identity(name: str, inputs: Iterable[str], kind: int, rank: int | None = None) -> Any:
    """Return a node that passes its input on; TensorFlow's optimizer keeps it, other than an Identity.

    rank: None if unknown.
    """
    # Grappler removes Identity nodes.
    node = new_node(name, "EnsureShape", inputs, T=kind)
    shape = node.attr["shape"].shape
    shape.unknown_rank = rank is None
    shape.dim.extend([tensor_shape_pb2.TensorShapeProto.Dim(size=-1)] * (rank or 0))
    return node


def placeholder(name: str, kind: int, shape: tf.TensorShape) -> Any:
    """Return a node whose value is fed."""
    node = new_node(name, "Placeholder", dtype=kind)
    node.attr["shape"].shape.CopyFrom(shape.as_proto())
    return node


def control_trigger(name: str, nodes: Iterable[str]) -> Any:
    """Return a node that runs when each of some nodes of its frame has run or is dead.

    Other nodes that wait for a dead node are dead, too.
    """
    return new_node(name, "ControlTrigger", [f"^{node}" for node in nodes])

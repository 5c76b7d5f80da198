"""Nodes of graphs, as protocol buffers have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2, tensor_shape_pb2
from tensorflow.python.framework import tensor_util

INT64 = tf.int64.as_datatype_enum


def new_node(name: str, op: str, inputs: Iterable[str] = (), N: int = 0, **types: int) -> Any:
    """A node; N: how many tensors a list among its inputs has.  types: enums, by attribute."""
    made = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute, value in types.items():
        made.attr[attribute].type = value
    if N:
        made.attr["N"].i = N
    return made


def constant(name: str, value: Any, waits: Iterable[str] = ()) -> Any:
    """A node that gives a value, in the frame of what it waits for."""
    made = new_node(name, "Const", waits)
    made.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(value))
    made.attr["dtype"].type = made.attr["value"].tensor.dtype
    return made


def passed(name: str, inputs: Iterable[str], kind: int, rank: int | None = None) -> Any:
    """A node that gives what it reads, and that TensorFlow does not take away; rank: None if not known."""
    made = new_node(name, "EnsureShape", inputs, T=kind)
    shape = made.attr["shape"].shape
    shape.unknown_rank = rank is None
    shape.dim.extend([tensor_shape_pb2.TensorShapeProto.Dim(size=-1)] * (rank or 0))
    return made


def placeholder(name: str, kind: int, shape: tf.TensorShape) -> Any:
    """A node whose value is fed."""
    made = new_node(name, "Placeholder", dtype=kind)
    made.attr["shape"].shape.CopyFrom(shape.as_proto())
    return made


def either(name: str, nodes: Iterable[str]) -> Any:
    """A node that runs when each of some nodes of its frame either has run or is left out.

    What waits for a node that is left out is left out too, but for a ControlTrigger.
    """
    return new_node(name, "ControlTrigger", [f"^{one}" for one in nodes])

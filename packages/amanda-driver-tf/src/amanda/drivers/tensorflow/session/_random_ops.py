"""Random operations, whose copies draw from the originals, since the kernel holds the generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import tensorflow as tf
from amanda.backend import Execution
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as c_api

from ..graph._slots import py_func

_OPTIONS = config_pb2.RunOptions(inter_op_thread_pool=-1).SerializeToString()
"""Options for a run within a run: on the calling thread, since no other thread may be free."""


class SessionExecution(Execution):
    """An execution of a session's run.

    session: a weak reference to the session.
    """

    session: ref[Any]


class OriginalDraw:
    """Runs a random operation of the user's graph on the inputs of its copy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, execution: Any, values: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the operation's outputs."""
        session = execution.session()
        op = session.graph.get_operation_by_name(self._name)
        feeds = {
            tensor._as_tf_output(): value.numpy() for tensor, value in zip(op.inputs, values, strict=True)
        }
        fetches = [tensor._as_tf_output() for tensor in op.outputs]
        options = c_api.TF_NewBufferFromString(_OPTIONS)
        try:
            drawn = c_api.TF_SessionRun_wrapper(session._session, options, feeds, fetches, [], None)
        finally:
            c_api.TF_DeleteBuffer(options)
        return [tf.constant(value, tensor.dtype) for value, tensor in zip(drawn, op.outputs, strict=True)]


def can_run_alone(op: Any) -> bool:
    """Return True if an operation can run by itself, on values fed for all its inputs."""
    plain = all(
        tensor.dtype not in (tf.resource, tf.variant) and not tensor.dtype._is_ref_dtype
        for tensor in (*op.inputs, *op.outputs)
    )
    return plain and bool(op.inputs) and not op.control_inputs


def draw_node(node: Any, op: Any, slot: int, number: str) -> Any:
    """Return a node that takes the place of a random op's copy: with the same name, inputs and outputs."""
    input_types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in op.inputs]
    result_types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in op.outputs]
    return py_func(node.name, slot, [number, *node.input], input_types, result_types)

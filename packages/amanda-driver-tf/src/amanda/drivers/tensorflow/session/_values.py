"""Present values of a graph's symbols, for `get_value` at analysis."""

from __future__ import annotations

from typing import Any
from weakref import ref

import tensorflow as tf

_VALUE_FORWARDING = ("Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Reshape", "Transpose")
_SOURCES = ("Const", "VariableV2", "Variable", "VarHandleOp")


class SessionValueReader:
    """Reads the values of constants and variables in a session; returns other symbols as they are."""

    def __init__(self, session: Any) -> None:
        self._session = ref(session)

    def __call__(self, tensor: Any) -> Any:
        session = self._session()
        if session is None or not _is_state(tensor.op):
            return tensor
        if tensor.dtype == tf.resource:
            tensor = _read_tensor(tensor)
        if tensor is None or tensor.dtype == tf.resource:
            return tensor
        return tf.convert_to_tensor(session.run(tensor), tensor.dtype.base_dtype)


def _is_state(op: Any) -> bool:
    """Return True if an operation's value depends on constants and variables alone."""
    if op.type in _VALUE_FORWARDING:
        return all(_is_state(tensor.op) for tensor in op.inputs)
    return op.type in _SOURCES


def _read_tensor(handle: Any) -> Any:
    """Return a tensor of the graph that reads a variable; None if there is none."""
    for op in handle.consumers():
        if op.type == "ReadVariableOp":
            return op.outputs[0]
    return None

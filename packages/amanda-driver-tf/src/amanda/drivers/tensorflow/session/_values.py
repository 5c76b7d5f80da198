"""Present values of a graph's symbols, for tools that ask at analysis."""

from __future__ import annotations

from typing import Any
from weakref import ref

import tensorflow as tf

_PASSING = ("Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Reshape", "Transpose")
_SOURCES = ("Const", "VariableV2", "Variable", "VarHandleOp")


class Reading:
    """Reads constants and variables in a session; other symbols it gives back as they are."""

    def __init__(self, session: Any) -> None:
        self._session = ref(session)

    def __call__(self, tensor: Any) -> Any:
        session = self._session()
        if session is None or not _is_state(tensor.op):
            return tensor
        if tensor.dtype == tf.resource:
            tensor = _read_of(tensor)
        if tensor is None or tensor.dtype == tf.resource:
            return tensor
        return tf.convert_to_tensor(session.run(tensor), tensor.dtype.base_dtype)


def _is_state(op: Any) -> bool:
    """Return True if an operation's value is a constant's or a variable's."""
    if op.type in _PASSING:
        return all(_is_state(tensor.op) for tensor in op.inputs)
    return op.type in _SOURCES


def _read_of(handle: Any) -> Any:
    """A tensor of the graph that has the value of a variable."""
    for op in handle.consumers():
        if op.type == "ReadVariableOp":
            return op.outputs[0]
    return None

"""Tensors as routines meet them: symbols at analysis, eager tensors while a graph runs."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import TensorOps
from amanda.errors import RoutineError

from .._tensors import TensorFlowTensors, fitting


class GraphTensors(TensorFlowTensors, TensorOps):
    """Tensor primitives for graphs, where routines run outside of every tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, symbolic or not."""
        return isinstance(value, tf.Tensor)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor, also in lists."""
        return tuple([_signature(value) for value in inputs])

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` in the type of `original`, whose shape it must have."""
        value, kind = fitting(original, value), original.dtype
        if value.dtype != kind:
            raise RoutineError(
                f"a routine returned {value.dtype.name} where {kind.name} was given; return that type"
            )
        return value

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raises RoutineError: nothing of TensorFlow writes into tensors."""
        raise RoutineError("a TensorFlow tensor cannot be written")

    def copied(self, value: Any) -> Any:
        """The value, which nothing writes into."""
        return value


PASSING = frozenset(
    {"Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Switch", "Reshape", "Transpose"}
)
"""Operations whose result is what their first input holds, in another form maybe."""
VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})


def variable_of(tensor: Any, argument: Callable[[Any], Any] = lambda placeholder: None) -> Any:
    """Return what holds the variable that a symbol was read of: its handle, or its own tensor; or None.

    argument: the same of what is given for a placeholder.
    """
    while tensor.op.type in PASSING:
        tensor = tensor.op.inputs[0]
    if tensor.op.type in VARIABLES:
        return tensor
    return argument(tensor) if tensor.op.type == "Placeholder" else None


def _signature(value: Any) -> Hashable:
    if isinstance(value, tf.Tensor):
        return (value.dtype.as_datatype_enum, value.shape.rank)
    return tuple([_signature(one) for one in value]) if isinstance(value, list) else None

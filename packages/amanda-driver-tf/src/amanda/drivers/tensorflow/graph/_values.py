"""Tensors as routines meet them: symbols at analysis, eager tensors while a graph runs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import TensorOps
from amanda.errors import RoutineError
from tensorflow.python import pywrap_tfe

from .._recording import Unrecorded


class GraphTensors(TensorOps):
    """Tensor primitives for graphs, where routines run outside of every tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, symbolic or not."""
        return isinstance(value, tf.Tensor)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor, also in lists."""
        return tuple([_signature(value) for value in inputs])

    def shapes(self, inputs: Sequence[Any]) -> Hashable:
        """Shape of each tensor, as far as it is known, also in lists."""
        return tuple([_shape(value) for value in inputs])

    def isolated(self) -> Unrecorded:
        """Context in which no tape records."""
        return Unrecorded()

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine where no tape records; a hot path."""
        if pywrap_tfe.TFE_Py_TapeSetIsStopped():
            return func(*values, **kwargs)
        with Unrecorded():
            return func(*values, **kwargs)

    def version(self, value: Any) -> Any:
        """Tensors are never written into."""
        return None

    def versions(self, values: Sequence[Any]) -> list[None]:
        """None for each value."""
        return [None] * len(values)

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` in the type of `original`, whose shape it must have."""
        return fitting(original, value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Nothing of TensorFlow writes into tensors."""
        raise RoutineError("a TensorFlow tensor cannot be written")

    def kept(self, value: Any) -> Any:
        """The value: an eager tensor without a tape hangs in no graph."""
        return value

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


def fitting(original: Any, value: Any) -> Any:
    """`value` for `original`: of its shape and kind, in its floating type.

    Raises RoutineError otherwise.
    """
    if not original.shape.is_compatible_with(value.shape):
        raise RoutineError(
            f"a routine returned shape {tuple(value.shape)} where shape {tuple(original.shape)} was "
            "given; mark it @amanda.differentiable if it is meant to change shapes"
        )
    if original.dtype == value.dtype:
        return value
    if original.dtype.is_complex != value.dtype.is_complex:
        raise RoutineError(
            f"a routine returned {value.dtype.name} where {original.dtype.name} was given; it may not "
            "turn real into complex or back"
        )
    numeric = original.dtype.is_floating or original.dtype.is_complex
    if not numeric or not (value.dtype.is_floating or value.dtype.is_complex):
        raise RoutineError(
            f"a routine returned {value.dtype.name} where {original.dtype.name} was given; return "
            f"{'a floating type' if numeric else 'that type'}"
        )
    return tf.cast(value, original.dtype)


def _signature(value: Any) -> Hashable:
    if isinstance(value, tf.Tensor):
        return (value.dtype.as_datatype_enum, value.shape.rank)
    return tuple([_signature(one) for one in value]) if isinstance(value, list) else None


def _shape(value: Any) -> Hashable:
    if isinstance(value, tf.Tensor):
        return None if value.shape.rank is None else tuple(value.shape.as_list())
    return tuple([_shape(one) for one in value]) if isinstance(value, list) else None

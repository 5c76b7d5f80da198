"""Tensors of graphs: primitives for tools, values at a side of an operation, values that routines read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

import tensorflow as tf
from amanda.backend import Reads, Side, TensorOps
from amanda.errors import RoutineError

from .._tensors import EagerTensorOps, cast_like


class GraphTensorOps(EagerTensorOps, TensorOps):
    """Tensor primitives for graphs, where routines run outside of every tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, symbolic or not."""
        return isinstance(value, tf.Tensor)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each tensor, including tensors in lists."""
        return tuple([_signature(value) for value in inputs])

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the dtype of `original`, whose shape it must have."""
        value, kind = cast_like(original, value), original.dtype
        # Nodes that read the tensor were created for its dtype. `cast_like` casts floating types alone.
        if value.dtype != kind:
            raise RoutineError(
                f"a routine returned {value.dtype.name} where {kind.name} was given; return that type"
            )
        return value

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raise RoutineError: no operation of TensorFlow writes into tensors."""
        raise RoutineError("a TensorFlow tensor cannot be written")

    def copied(self, value: Any) -> Any:
        """Return the value itself, since tensors are immutable."""
        return value


# Keras' attention casts, reshapes or transposes a weight ahead of its product: the weight is found behind
# these operations, too.
VALUE_FORWARDING = frozenset(
    {"Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Switch", "Reshape", "Transpose"}
)
"""Operations whose result is the value of their first input, cast or rearranged."""
VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})


def variable_of(tensor: Any, argument: Callable[[Any], Any] = lambda placeholder: None) -> Any:
    """Return the handle or tensor of the variable that a symbol was read from; None for others.

    argument: returns the variable that a placeholder stands for.
    """
    while tensor.op.type in VALUE_FORWARDING:
        tensor = tensor.op.inputs[0]
    if tensor.op.type in VARIABLES:
        return tensor
    return argument(tensor) if tensor.op.type == "Placeholder" else None


def _signature(value: Any) -> Hashable:
    """Return dtype and rank of a tensor, those of each tensor of a list, None for another value."""
    if isinstance(value, tf.Tensor):
        return (value.dtype.as_datatype_enum, value.shape.rank)
    return tuple([_signature(element) for element in value]) if isinstance(value, list) else None


class TensorFlowReads(Reads):
    """Reads with the plain values of TensorFlow and NumPy, and with the layers of Keras."""

    plain: ClassVar = (*Reads.plain, tf.DType, tf.TensorShape, np.dtype, np.generic)
    opaque: ClassVar = Reads.opaque | {"tensorflow", "keras", "tf_keras"}
    # A layer's `__call__` is code of Keras, which is opaque; it calls the user's `call`.
    called: ClassVar = (*Reads.called, "call")

    def look_into(self, value: Any) -> bool:
        """Return True if routines read a value's attributes; of a framework's objects, those of layers."""
        return super().look_into(value) or hasattr(type(value), "call")


_OPAQUE = (tf.resource, tf.variant)


class OpSide(Side):
    """The inputs of an operation (`ahead`), or its outputs.

    layout: name and length of each value; by default each tensor is a value.
    references: True for each value that is a reference to a variable, which may have no value.
    op_refs: refs of the outputs of the operation, or of its replacement.
    """

    def __init__(
        self,
        op: tf.Operation,
        ahead: bool,
        refs: Sequence[str],
        tensors: Sequence[Any],
        layout: Sequence[tuple[str, int | None]] = (),
        references: Sequence[bool] = (),
    ) -> None:
        sizes = [size for _, size in layout]
        lengths = [1 if size is None else size for size in sizes]
        # A function that is called by its name has no OpDef, so its layout is empty.
        if sum(lengths) != len(tensors):
            sizes, references = [None] * len(tensors), ()
        flags = [flag for flag, length in zip(references, lengths, strict=False) for _ in range(length)]
        super().__init__(refs, tensors, sizes, [i for i, flag in enumerate(flags) if flag])
        self.op = op
        self.ahead = ahead
        self.op_refs = self.before


def op_side(side: Side) -> OpSide:
    """Return a side as an OpSide, for the type checker."""
    assert isinstance(side, OpSide)
    return side


def is_plain(tensor: Any) -> bool:
    """Return True if Python can return a tensor: it is neither a handle nor a reference."""
    return tensor.dtype not in _OPAQUE and not tensor.dtype._is_ref_dtype


def dtype_enum(tensor: Any) -> int:
    """Return the enum of a tensor's dtype in protocol buffers."""
    number: int = tensor.dtype.base_dtype.as_datatype_enum
    return number


def estimated_nbytes(tensor: Any) -> int:
    """Return the memory of a tensor, with 32 for each unknown dimension."""
    if tensor.shape.rank is None:
        return 1 << 20
    total = max(tensor.dtype.size, 1)
    for size in tensor.shape.as_list():
        total *= 32 if size is None else size
    return int(total)

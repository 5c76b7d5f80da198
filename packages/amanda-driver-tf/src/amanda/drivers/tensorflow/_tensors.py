"""Primitives of tensors: isolation from the tape, the straight-through edge, signatures."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from amanda.errors import RoutineError
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework.ops import EagerTensor

from ._recording import Unrecorded


class TensorFlowTensors:
    """`TensorOps` of TensorFlow: of eager tensors, and what those of graphs share with them."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, or a variable, which stands for what it holds."""
        return isinstance(value, (tf.Tensor, tf.Variable))

    def isolated(self) -> Unrecorded:
        """Context in which no tape records."""
        return Unrecorded()

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine where no tape records; a hot path."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty() or pywrap_tfe.TFE_Py_TapeSetIsStopped():
            return func(*values, **kwargs)
        with Unrecorded():
            return func(*values, **kwargs)

    def version(self, value: Any) -> None:
        """None: a tensor holds what it held."""

    def versions(self, values: Sequence[Any]) -> list[None]:
        """None for each value."""
        return [None] * len(values)

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` for `original`, in its floating type, with its gradient passed straight through."""
        recording = not pywrap_tfe.TFE_Py_TapeSetIsEmpty() and not pywrap_tfe.TFE_Py_TapeSetIsStopped()
        if not recording:
            return fitting(original, value)
        with Unrecorded():
            fresh = tf.raw_ops.Identity(input=fitting(original, value))  # it may be on the tape itself
        pywrap_tfe.TFE_Py_TapeSetRecordOperation("Identity", [fresh], [original], _passed, _passed)
        return fresh

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raises RoutineError: what an op writes into is a variable, whose handle is no value."""
        raise RoutineError(
            "a routine returned another handle for a variable that the op writes; change the value that is "
            "assigned instead"
        )

    def kept(self, value: Any) -> Any:
        """The value itself: a tensor does not hold the tape that it is on."""
        return value

    def copied(self, value: Any) -> Any:
        """A differentiable copy; a variable's handle as it is, for there is no other."""
        return tf.identity(value) if isinstance(value, tf.Tensor) and value.dtype != tf.resource else value

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of each tensor, also in lists."""
        return tuple(
            [
                (value._datatype_enum(), value._rank(), value.device) if type(value) is EagerTensor
                else tuple([_signature(one) for one in value]) if isinstance(value, (list, tuple))
                else _signature(value)
                for value in inputs
            ]
        )  # fmt: skip

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor, also in lists; None for an extent or a rank that is not known."""
        return tuple([_shape(value) for value in inputs])


def _passed(*grads: Any) -> list[Any]:
    return list(grads)


def _signature(value: Any) -> Hashable:
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.dtype, value.shape.rank, value.device
    return None


def _shape(value: Any) -> Hashable:
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return None if value.shape.rank is None else tuple(value.shape.as_list())
    if isinstance(value, (list, tuple)):
        return tuple([_shape(one) for one in value])
    return None


def fitting(original: Any, value: Any) -> Any:
    """`value` for `original`: of its shape and kind, in its floating type.

    Raises RoutineError otherwise.
    """
    value = tf.convert_to_tensor(value)
    if not original.shape.is_compatible_with(value.shape):
        raise RoutineError(
            f"a routine returned shape {value.shape} where shape {original.shape} was given; mark it "
            "@amanda.differentiable if it is meant to change shapes"
        )
    wanted, found = original.dtype, value.dtype
    if wanted.is_complex != found.is_complex:
        raise RoutineError(
            f"a routine returned {found.name} where {wanted.name} was given; it may not turn real into "
            "complex or back"
        )
    if wanted != found and (wanted.is_floating or wanted.is_complex):
        if not (found.is_floating or found.is_complex):
            raise RoutineError(
                f"a routine returned {found.name} where {wanted.name} was given; return a floating type"
            )
        return tf.cast(value, wanted)
    return value

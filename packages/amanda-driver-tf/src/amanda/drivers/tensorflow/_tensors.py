"""Primitives of tensors: the straight-through edge, signatures, isolation from the program's tapes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Patches, complex_error, dtype_error, shape_error
from amanda.errors import RoutineError
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop
from tensorflow.python.framework.ops import EagerTensor


class EagerTensorOps:
    """`TensorOps` of eager tensors for the core: signatures, replacement, isolation from tapes."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor or a variable."""
        return isinstance(value, (tf.Tensor, tf.Variable))

    def without_autodiff(self) -> Unrecorded:
        """Return a context in which no tape records."""
        return Unrecorded()

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine while no tape records; a hot path."""
        # Two native calls cost less than entering a context, and most routines run without a tape.
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty() or pywrap_tfe.TFE_Py_TapeSetIsStopped():
            return func(*values, **kwargs)
        with Unrecorded():
            return func(*values, **kwargs)

    def version(self, value: Any) -> None:
        """Return None: TensorFlow's tensors are immutable."""

    def versions(self, values: Sequence[Any]) -> list[None]:
        """Return None for each value."""
        return [None] * len(values)

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the type of `original`; a tape passes its gradient to `original` unchanged.

        Raises RoutineError as `cast_like` does.
        """
        is_recording = not pywrap_tfe.TFE_Py_TapeSetIsEmpty() and not pywrap_tfe.TFE_Py_TapeSetIsStopped()
        if not is_recording:
            return cast_like(original, value)
        with Unrecorded():
            # The tape may watch `value` itself, so the edge to `original` starts at a new tensor.
            alias = tf.raw_ops.Identity(input=cast_like(original, value))
        # An identity's gradient function, and its function for forward-mode gradients.
        pywrap_tfe.TFE_Py_TapeSetRecordOperation(
            "Identity", [alias], [original], _gradient_unchanged, _gradient_unchanged
        )
        return alias

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raise RoutineError: an op writes into variables, whose handles a routine cannot replace."""
        raise RoutineError(
            "a routine returned another handle for a variable that the op writes; change the value that is "
            "assigned instead"
        )

    def detach_value(self, value: Any) -> Any:
        """Return the value: a tensor does not hold the tape that it is on."""
        return value

    def differentiable_copy(self, value: Any) -> Any:
        """Return a differentiable copy of a tensor; a variable's handle and other values as they are."""
        return tf.identity(value) if isinstance(value, tf.Tensor) and value.dtype != tf.resource else value

    # A hot path: native calls for eager tensors, which nearly all values are, and lists, since a tuple is
    # made from a list faster than from a generator.
    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype, rank and device of each tensor, a tuple of these for a list, else None."""
        return tuple(
            [
                (value._datatype_enum(), value._rank(), value.device) if type(value) is EagerTensor
                else tuple([_signature(element) for element in value]) if isinstance(value, (list, tuple))
                else _signature(value)
                for value in inputs
            ]
        )  # fmt: skip

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of each tensor, also in lists; None for another value, unknown extent or rank."""
        return tuple([_shape(value) for value in inputs])


def _gradient_unchanged(*grads: Any) -> list[Any]:
    """Return gradients as they are: the backward, and the forward-mode, function of an identity."""
    return list(grads)


def _signature(value: Any) -> Hashable:
    """Return dtype, rank and device of a tensor or variable; None for another value."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.dtype, value.shape.rank, value.device
    return None


def _shape(value: Any) -> Hashable:
    """Return the shape of a tensor, or of each in a list; None for an unknown rank and other values."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return None if value.shape.rank is None else tuple(value.shape.as_list())
    if isinstance(value, (list, tuple)):
        return tuple([_shape(element) for element in value])
    return None


def cast_like(original: Any, value: Any) -> Any:
    """Return `value` as a tensor, cast to the dtype of `original` if that is floating or complex.

    Raises RoutineError for another shape, and for an integer instead of a floating type, or a real value
    instead of a complex one and the reverse.  For an integer `original` the dtype of `value` stays.
    """
    value = tf.convert_to_tensor(value)
    if not original.shape.is_compatible_with(value.shape):
        raise shape_error(value.shape, original.shape)
    original_dtype, value_dtype = original.dtype, value.dtype
    if original_dtype.is_complex != value_dtype.is_complex:
        raise complex_error(value_dtype.name, original_dtype.name)
    if original_dtype != value_dtype and (original_dtype.is_floating or original_dtype.is_complex):
        if not (value_dtype.is_floating or value_dtype.is_complex):
            raise dtype_error(value_dtype.name, original_dtype.name)
        return tf.cast(value, original_dtype)
    return value


class _UnrecordedCount(threading.local):
    """The number of open `Unrecorded` contexts of a thread."""

    count = 0


_open_unrecorded = _UnrecordedCount()


class Unrecorded:
    """Context in which no gradient tape or forward accumulator records; faster than `tape.stop_recording`."""

    __slots__ = ("_was_stopped",)

    def __enter__(self) -> None:
        """Stop recording, unless it is stopped already: then leaving the context does not restart it.

        Counts the context as open, so that a tape that a routine opens records.
        """
        was_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        self._was_stopped = was_stopped
        _open_unrecorded.count += 1
        if not was_stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    def __exit__(self, *_: object) -> None:
        """Restart recording if entering stopped it."""
        was_stopped, self._was_stopped = self._was_stopped, None
        _open_unrecorded.count -= 1
        if not was_stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()

    def __del__(self) -> None:
        # An interrupt may come between the end of the body and `__exit__`, and would leave recording off.
        if getattr(self, "_was_stopped", None) is not None:
            self.__exit__()


def allow_tapes_in_routines(patches: Patches) -> None:
    """Make a tape that a routine opens record while it is open.

    TensorFlow stops and restarts recording for all tapes of a thread at once. So the program's tapes record
    the routine's ops, too; these do not count, since the routine's result is cut off from the ops that
    computed it.
    """
    # Recording is stopped in native code, which has no switch for a single tape.
    push_original, pop_original = backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape

    @functools.wraps(push_original)
    def _push_tape(tape: Any) -> None:
        """Stand-in for `GradientTape._push_tape`: restarts recording within a routine, noted on the tape."""
        # A routine runs in an `Unrecorded` context, unless no tape was recording anyway.
        if _open_unrecorded.count and pywrap_tfe.TFE_Py_TapeSetIsStopped():
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            # The tape remembers that it restarted recording: tapes may be closed in another order than they
            # were opened.
            tape._amanda_restarted = True
        push_original(tape)

    @functools.wraps(pop_original)
    def _pop_tape(tape: Any) -> None:
        """Stand-in for `GradientTape._pop_tape`: stops recording again if this tape restarted it."""
        pop_original(tape)
        if getattr(tape, "_amanda_restarted", False):
            tape._amanda_restarted = False
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    patches.set(backprop.GradientTape, "_push_tape", _push_tape)
    patches.set(backprop.GradientTape, "_pop_tape", _pop_tape)

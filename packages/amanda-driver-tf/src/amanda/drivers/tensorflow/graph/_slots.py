"""The Python functions behind EagerPyFunc nodes: one for each slot, for all graphs of the process."""

import ctypes
import threading
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from amanda.backend import Execution, Insertion
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import script_ops
from tensorflow.python.pywrap_tfe import TFE_Py_TapeSetIsEmpty

from .._recording import Unrecorded
from ._handles import borrowed
from ._nodes import INT64, new_node
from ._taping import Kept, Readers, gradients, recorded


class _Calling(threading.local):
    """Whose routines run on this thread of TensorFlow's; None on others."""

    execution: Execution | None = None

    def __init__(self) -> None:
        """Keep the state that Python has for a thread: TensorFlow would drop it after each call.

        A new one, and what threads keep of their own in it, takes twice as long as the call of a routine.
        """
        ctypes.pythonapi.PyGILState_Ensure()


calling = _Calling()
_EAGER = nullcontext()


class Slot(script_ops.EagerFunc):  # type: ignore[misc]
    """Calls what an execution has at one slot.

    The first tensor is the execution's number; in loops a vector, in which the round of each loop follows.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> Any:
        """Run the routines on eager tensors, with no tape recording."""
        if context.executing_eagerly() and TFE_Py_TapeSetIsEmpty():  # a hot path, on TensorFlow's threads
            return self._called(device, args)
        with _EAGER if context.executing_eagerly() else context.eager_mode(), Unrecorded():
            return self._called(device, args)

    def _called(self, device: Any, args: Sequence[Any]) -> Any:
        number = args[0]._numpy_internal().tolist()
        number, *rounds = number if isinstance(number, list) else (number,)
        execution = Execution.of(number)
        before, calling.execution = calling.execution, execution
        try:
            outputs = execution.call(self.index, args[1:], rounds)
        finally:
            calling.execution = before
        return [_on(device, one) for one in outputs] if device is not None else outputs


def _on(device: Any, value: Any) -> Any:
    if value.backing_device == device:
        return value
    with tf.device(device):
        return script_ops._maybe_copy_to_context_device(value, device)


class _Slots:
    """Slots that have been made, in order, with the tokens that TensorFlow knows them by."""

    def __init__(self) -> None:
        self._slots: list[tuple[Slot, bytes]] = []
        self._lock = threading.Lock()

    def token(self, index: int) -> bytes:
        """Return what an EagerPyFunc node names a slot by."""
        with self._lock:
            while len(self._slots) <= index:
                slot = Slot(len(self._slots))
                self._slots.append((slot, script_ops._py_funcs.insert(slot).encode()))
        return self._slots[index][1]


_slots = _Slots()


class Node(Insertion):
    """Routines at one place, whose results have the types that the graph has there.

    keeps: under what name it keeps its values for a backward pass; None where it does not.
    taped: whether the way from what it is given to what it gives back is differentiated.
    readers: of what it keeps.
    borrows: positions where it is given numbers of handles.
    """

    __slots__ = ("borrows", "dtypes", "keeps", "readers", "taped")

    readers: Readers

    def __init__(self, *layout: Any) -> None:
        super().__init__(*layout)
        self.dtypes: Sequence[Any] = ()
        self.keeps: Hashable = None
        self.taped = False
        self.borrows: Sequence[int] = ()

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """The flat tensors that go back into the graph, each of its type."""
        flat = borrowed(execution, flat, self.borrows)
        if self.taped:
            values = recorded(lambda: self._results(execution, flat, rounds), list(flat))
        else:
            values = list(flat), self._results(execution, flat, rounds), None
        if self.keeps is not None:
            count = self.readers.count if self.readers.told else 0
            execution.store((self.keeps, *rounds[: self.depth]), Kept(values, count))
        return values[1]

    def _results(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int]) -> list[Any]:
        results = super().run(execution, flat, rounds)
        return [_typed(value, dtype) for value, dtype in zip(results, self.dtypes, strict=True)]


class Recalled:
    """Gives a tensor that a place kept in the forward pass: of what it was given, or of what it gave.

    depth: how many loops were around the place.
    """

    def __init__(self, place: Hashable, side: int, index: int, depth: int) -> None:
        self.place = place
        self.side = side
        self.index = index
        self.depth = depth

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the tensor."""
        kept: Kept = execution.stored_value((self.place, *rounds[: self.depth]), self)
        tensor: Any = kept.taken()[self.side][self.index]
        return [tensor]


class Pullback:
    """Takes gradients of what a place gave to gradients of what it was given.

    outputs, inputs: positions among those of the place.  depth: how many loops were around it.
    """

    def __init__(self, place: Hashable, outputs: Sequence[int], inputs: Sequence[int], depth: int) -> None:
        self.place = place
        self.depth = depth
        self.outputs = tuple(outputs)
        self.inputs = tuple(inputs)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """The vector-Jacobian products."""
        kept: Kept = execution.stored_value((self.place, *rounds[: self.depth]), self)
        return gradients(kept.taken(), self.outputs, self.inputs, flat)


def _typed(value: Any, dtype: Any) -> Any:
    if type(value) is EagerTensor and value._datatype_enum() == dtype.as_datatype_enum:  # a hot path
        return value
    if isinstance(value, tf.Tensor) and value.dtype == dtype:
        return value
    if isinstance(value, tf.Tensor) or getattr(value, "dtype", None) is not None:
        return tf.cast(value, dtype)
    return tf.convert_to_tensor(value, dtype)


def py_func(name: str, slot: int, inputs: Sequence[str], given: Sequence[int], gives: Sequence[int]) -> Any:
    """A node that calls a slot.

    inputs: the number's name, the values', and control inputs.  given, gives: enums of the values' types.
    """
    made = new_node(name, "EagerPyFunc", inputs)
    made.attr["token"].s = _slots.token(slot)
    made.attr["is_async"].b = False
    made.attr["Tin"].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=[INT64, *given]))
    made.attr["Tout"].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(gives)))
    return made

"""The Python functions of EagerPyFunc nodes: one for each slot, shared by all graphs of the process."""

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
from ._autodiff import Readers, SavedValues, call_on_tape, pull_back
from ._handles import resolve_handles
from ._nodes import INT64, new_node


class _RunningExecution(threading.local):
    """The execution whose routines run on a thread of TensorFlow; None on other threads."""

    execution: Execution | None = None

    def __init__(self) -> None:
        """Keep Python's state of the thread alive."""
        # TensorFlow would drop the thread state after each call. A new thread state, with its thread-local
        # objects, takes twice as long as the call of a routine.
        ctypes.pythonapi.PyGILState_Ensure()


running = _RunningExecution()
_EAGER = nullcontext()


class RoutineSlot(script_ops.EagerFunc):  # type: ignore[misc]
    """Calls the routines that an execution has at a slot.

    The first tensor is the execution's number; in loops, a vector of the number and the round of each loop.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> Any:
        """Run the routines on eager tensors, with no tape recording."""
        if context.executing_eagerly() and TFE_Py_TapeSetIsEmpty():  # a hot path, on TensorFlow's threads
            return self._call_routines(device, args)
        with _EAGER if context.executing_eagerly() else context.eager_mode(), Unrecorded():
            return self._call_routines(device, args)

    def _call_routines(self, device: Any, args: Sequence[Any]) -> Any:
        """Call the routines of the execution whose number is the first tensor."""
        # `_numpy_internal` makes no copy, and skips the checks of `numpy()`.
        number = args[0]._numpy_internal().tolist()
        number, *rounds = number if isinstance(number, list) else (number,)
        execution = Execution.of(number)
        outer, running.execution = running.execution, execution
        try:
            outputs = execution.call(self.index, args[1:], rounds)
        finally:
            running.execution = outer
        return [_on_device(device, output) for output in outputs] if device is not None else outputs


def _on_device(device: Any, value: Any) -> Any:
    if value.backing_device == device:
        return value
    with tf.device(device):
        return script_ops._maybe_copy_to_context_device(value, device)


class _SlotTable:
    """The slots of the process in order, with the tokens by which TensorFlow finds them."""

    def __init__(self) -> None:
        self._slots: list[tuple[RoutineSlot, bytes]] = []
        self._lock = threading.Lock()

    def token(self, index: int) -> bytes:
        """Return the token of a slot for an EagerPyFunc node; slots are created as needed."""
        with self._lock:
            # TensorFlow holds the functions of tokens weakly, so this table keeps them alive.
            while len(self._slots) <= index:
                slot = RoutineSlot(len(self._slots))
                self._slots.append((slot, script_ops._py_funcs.insert(slot).encode()))
        return self._slots[index][1]


_slots = _SlotTable()


class RoutineNode(Insertion):
    """Routines at a place of a graph, whose results are cast to the dtypes of the graph.

    dtypes: dtypes of the results.
    saved_as: the key under which its values are saved for a backward pass; None if they are not.
    in_autodiff: True if gradients go through the routines.
    readers: the readers of the saved values.
    loaned_positions: positions of inputs that are numbers of handles.
    """

    __slots__ = ("dtypes", "in_autodiff", "loaned_positions", "readers", "saved_as")

    readers: Readers

    def __init__(self, *layout: Any) -> None:
        super().__init__(*layout)
        self.dtypes: Sequence[Any] = ()
        self.saved_as: Hashable = None
        self.in_autodiff = False
        self.loaned_positions: Sequence[int] = ()

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines; return the flat tensors that go back into the graph."""
        flat = resolve_handles(execution, flat, self.loaned_positions)
        if self.in_autodiff:
            values = call_on_tape(lambda: self._results(execution, flat, rounds), list(flat))
        else:
            values = list(flat), self._results(execution, flat, rounds), None
        if self.saved_as is not None:
            count = self.readers.count if self.readers.read_once else 0
            execution.store((self.saved_as, *rounds[: self.depth]), SavedValues(values, count))
        return values[1]

    def _results(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int]) -> list[Any]:
        results = super().run(execution, flat, rounds)
        return [_as_dtype(value, dtype) for value, dtype in zip(results, self.dtypes, strict=True)]


class RecalledTensor:
    """Returns a tensor that a node saved in the forward pass.

    place: the key of the saved values.  side: 0 for inputs of the node, 1 for its outputs.
    depth: number of loops around the node.
    """

    def __init__(self, place: Hashable, side: int, index: int, depth: int) -> None:
        self.place = place
        self.side = side
        self.index = index
        self.depth = depth

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the tensor."""
        saved: SavedValues = execution.stored_value((self.place, *rounds[: self.depth]), self)
        tensor: Any = saved.take()[self.side][self.index]
        return [tensor]


class Pullback:
    """Computes gradients of a node's inputs from gradients of its outputs.

    place: the key of the node's saved values.  outputs, inputs: positions among these.
    depth: number of loops around the node.
    """

    def __init__(self, place: Hashable, outputs: Sequence[int], inputs: Sequence[int], depth: int) -> None:
        self.place = place
        self.depth = depth
        self.outputs = tuple(outputs)
        self.inputs = tuple(inputs)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the vector-Jacobian products."""
        saved: SavedValues = execution.stored_value((self.place, *rounds[: self.depth]), self)
        return pull_back(saved.take(), self.outputs, self.inputs, flat)


def _as_dtype(value: Any, dtype: Any) -> Any:
    """Convert a routine's result to a dtype; a hot path."""
    if type(value) is EagerTensor and value._datatype_enum() == dtype.as_datatype_enum:  # a hot path
        return value
    if isinstance(value, tf.Tensor) and value.dtype == dtype:
        return value
    if isinstance(value, tf.Tensor) or getattr(value, "dtype", None) is not None:
        return tf.cast(value, dtype)
    return tf.convert_to_tensor(value, dtype)


def py_func(
    name: str, slot: int, inputs: Sequence[str], input_types: Sequence[int], result_types: Sequence[int]
) -> Any:
    """Return a node that calls a slot.

    inputs: refs of the number and the values, and control inputs.
    input_types, result_types: dtype enums of the values.
    """
    node = new_node(name, "EagerPyFunc", inputs)
    node.attr["token"].s = _slots.token(slot)
    node.attr["is_async"].b = False
    node.attr["Tin"].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=[INT64, *input_types]))
    node.attr["Tout"].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(result_types)))
    return node

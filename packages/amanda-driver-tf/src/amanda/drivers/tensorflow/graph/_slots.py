"""The Python functions of EagerPyFunc nodes: routines at an operation, and observers of several operations.

Each function has a slot, which all graphs of the process share.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import tensorflow as tf
from amanda.backend import (
    Action,
    Execution,
    Executions,
    Insertion,
    Observed,
    annotate_failure,
    match_results,
    selected_values,
)
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import script_ops
from tensorflow.python.pywrap_tfe import TFE_Py_TapeSetIsEmpty

from .._tensors import Unrecorded
from ._autodiff import Readers, SavedKey, SavedValues, TapedValues, call_on_tape
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
        # Without a tape there is nothing to stop, and entering a context costs more than these two calls.
        if context.executing_eagerly() and TFE_Py_TapeSetIsEmpty():  # a hot path, on TensorFlow's threads
            return self._call_routines(device, args)
        with _EAGER if context.executing_eagerly() else context.eager_mode(), Unrecorded():
            return self._call_routines(device, args)

    def _call_routines(self, device: Any, args: Sequence[Any]) -> Any:
        """Call the routines of the execution whose number is the first tensor; return results on `device`."""
        number_tensor, *values = args
        # `_numpy_internal` makes no copy, and skips the checks of `numpy()`.
        number_and_rounds = number_tensor._numpy_internal().tolist()
        number, *rounds = number_and_rounds if isinstance(number_and_rounds, list) else (number_and_rounds,)
        execution = Execution.by_number(number)
        outer_execution, running.execution = running.execution, execution
        try:
            outputs = execution.call(self.index, values, rounds)
        finally:
            running.execution = outer_execution
        # The nodes that read the results expect them on the device of this node; ops of a routine may run
        # elsewhere.
        return [_on_device(device, output) for output in outputs] if device is not None else outputs


def _on_device(device: Any, value: Any) -> Any:
    """Return an eager tensor on a device, copied if it is on another one."""
    if value.backing_device == device:
        return value
    with tf.device(device):
        return script_ops._maybe_copy_to_context_device(value, device)


class _SlotTable:
    """The slots of the process in order, with the tokens by which TensorFlow finds them."""

    def __init__(self) -> None:
        self._slots_with_tokens: list[tuple[RoutineSlot, bytes]] = []
        self._lock = threading.Lock()

    def token(self, index: int) -> bytes:
        """Return the token of a slot for an EagerPyFunc node; slots are created as needed."""
        with self._lock:
            # TensorFlow holds the functions of tokens weakly, so this table keeps them alive.
            while len(self._slots_with_tokens) <= index:
                slot = RoutineSlot(len(self._slots_with_tokens))
                self._slots_with_tokens.append((slot, script_ops._py_funcs.insert(slot).encode()))
        _, token = self._slots_with_tokens[index]
        return token


_slots = _SlotTable()


class RoutineNode(Insertion):
    """Routines at a place of a graph, whose results are cast to the dtypes of the graph.

    dtypes: dtypes of the results.
    saved_key: the key under which its values are saved for a backward pass; None if they are not saved.
    is_in_autodiff: True if gradients go through the routines.
    readers: the readers of the saved values.
    lent_positions: positions of inputs that are numbers of handles; see `LentHandle`.
    """

    __slots__ = ("dtypes", "is_in_autodiff", "lent_positions", "readers", "saved_key")

    readers: Readers

    def __init__(self, *layout: Any) -> None:
        super().__init__(*layout)
        self.dtypes: Sequence[Any] = ()
        self.saved_key: SavedKey | None = None
        self.is_in_autodiff = False
        self.lent_positions: Sequence[int] = ()

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the routines; return the flat tensors that go back into the graph.

        Saves inputs and outputs in the execution if gradients need them.
        """
        flat = resolve_handles(execution, flat, self.lent_positions)
        if self.is_in_autodiff:
            # The tape and its values are saved: pullbacks ask this tape when the gradients arrive.
            values = call_on_tape(lambda: self._results(execution, flat, rounds), list(flat))
        else:
            values = TapedValues(list(flat), self._results(execution, flat, rounds), tape=None)
        if self.saved_key is not None:
            # Where readers may run several times, or never, nobody can count them: the values live as long as
            # the run.
            read_count = self.readers.count if self.readers.read_once else 0
            execution.store((self.saved_key, *rounds[: self.loop_depth]), SavedValues(values, read_count))
        return values.outputs

    def _results(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int]) -> list[Any]:
        results = super().run(execution, flat, rounds)
        if len(results) != len(self.dtypes):  # a hot path: no call
            self.check_count(results, len(self.dtypes))
        try:
            return [_as_dtype(value, dtype) for value, dtype in zip(results, self.dtypes, strict=True)]
        except Exception as error:  # TensorFlow makes no tensor of what a replacement has returned
            self.facts.annotate_error(error, self.actions[0])
            raise


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


class _PlacedObserver:
    """An observer at an operation, whose values are among the inputs of a node that observers share.

    indices: indices of the operation's tensors among those of the node.
    layout: for each value that the observer selects, an index, a list of indices, or None for a value that
    the node does not read; None before the first execution, since a selection may raise.
    is_flat: True if the layout has indices alone.
    """

    __slots__ = ("action", "facts", "indices", "is_flat", "kwargs", "layout", "routine_node")

    def __init__(self, action: Action, routine_node: Insertion, indices: Sequence[int]) -> None:
        self.action = action
        self.facts = routine_node.facts
        self.routine_node = routine_node
        self.indices = indices
        self.kwargs = {**action.kwargs, "shapes": None} if action.takes_shapes else action.kwargs
        self.layout: Sequence[Any] | None = None
        self.is_flat = False

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values that the observer selects among the tensors of the node, `flat`.

        The first call computes the layout, and raises what the selection raises.
        """
        layout = self.layout
        if layout is None:
            # A selection of values is made on the indices in their place.
            layout = self.routine_node.unflatten(self.indices)
            if self.action.select is not None:
                layout = selected_values(self.action, layout, self.facts)
            self.layout, self.is_flat = layout, all(isinstance(index, int) for index in layout)
        if self.is_flat:
            return [flat[i] for i in layout]
        values: list[Any] = []
        for index_or_list in layout:
            if isinstance(index_or_list, list):
                values.append([flat[i] for i in index_or_list])
            else:
                values.append(None if index_or_list is None else flat[index_or_list])
        return values

    def explain(self, error: BaseException, flat: Sequence[Any], values: Sequence[Any]) -> None:
        """Add a note with the op to an exception of the observer, or raise a clearer exception.

        flat: the tensors of the node.  values: those that the observer was called with.
        """
        all_values = self.routine_node.unflatten([flat[i] for i in self.indices])
        clearer_error = annotate_failure(error, self.action, all_values, values, self.facts)
        if clearer_error is not None:
            raise clearer_error from error


class _ObserverGroup:
    """Observers of one tool with the same gathered function, which is called once for all of them.

    action: of the first observer; stands for all.
    prepared: a dict that the gathered function uses from run to run.
    is_laid_out: True if each observer has its layout.
    """

    __slots__ = ("action", "is_laid_out", "observers", "prepared")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.observers: list[_PlacedObserver] = []
        self.prepared: dict[Any, Any] = {}
        self.is_laid_out = False


class _LazyObserved(Sequence[Observed]):
    """The observations of a run, each created when it is read."""

    def __init__(
        self, observers: Sequence[_PlacedObserver], flat: Sequence[Any], run_of: Callable[..., dict[Any, Any]]
    ) -> None:
        self._observers = observers
        self._flat = flat
        self._run_of = run_of

    def __len__(self) -> int:
        return len(self._observers)

    def __getitem__(self, index: Any) -> Any:
        """Return a new `Observed`, or a list of these for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        observer = self._observers[index]
        return Observed(observer.values(self._flat), observer.kwargs, observer, self._run_of)

    def values(self) -> list[list[Any]]:
        """Return the values of each observer."""
        return [observer.values(self._flat) for observer in self._observers]

    def positions(self) -> list[Sequence[Any]]:
        """Return for each observer the positions of its values among the tensors of the node."""
        return [observer.layout or () for observer in self._observers]


class PackedObservers:
    """Observers of several operations, which run in the order of these and return nothing.

    Observers with a gathered function run after the others.  Opening routines are left out: they run as the
    execution begins.
    """

    def __init__(self, members: Sequence[tuple[Insertion, Sequence[int]]]) -> None:
        """Create the observers of `members`: routines, and the indices of their tensors in the node."""
        self.lent_positions: Sequence[int] = ()
        self._single_observers: list[_PlacedObserver] = []
        self._gathered_groups: dict[Any, _ObserverGroup] = {}
        for routine_node, indices in members:
            for action in routine_node.actions:
                observer = _PlacedObserver(action, routine_node, indices)
                if action.gathered is None:
                    self._single_observers.append(observer)
                elif not action.opening:
                    key = action.gathered, id(action.tool)
                    self._gathered_groups.setdefault(key, _ObserverGroup(action)).observers.append(observer)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Call each observer with its tensors, and each gathered function once; return []; a hot path.

        Notes the op in an exception of an observer.
        """
        flat = resolve_handles(execution, flat, self.lent_positions)

        def run_of(observer: _PlacedObserver) -> dict[Any, Any]:
            return observer.routine_node.run_dict(execution, rounds)

        for observer in self._single_observers:
            action = observer.action
            values: Sequence[Any] = ()
            if not execution.runs_action(action):
                continue
            try:
                values = observer.values(flat)
                kwargs = {**observer.kwargs, "run": run_of(observer)} if action.takes_run else observer.kwargs
                # A tool's routines run one at a time; TensorFlow runs nodes on many threads.
                with action.tool._amanda.lock:
                    result = action.func(*values, **kwargs)
                if result is not None:
                    match_results(action, result, values)
            except BaseException as error:
                observer.explain(error, flat, values)
                raise
        for group in self._gathered_groups.values():
            if execution.runs_action(group.action):
                self._compute_layouts(group, flat)
                observed = _LazyObserved(group.observers, flat, run_of)
                Executions(observed, flat, group.prepared, observed.values, observed.positions).observe(
                    group.action
                )
        return []

    @staticmethod
    def _compute_layouts(group: _ObserverGroup, flat: Sequence[Any]) -> None:
        """Compute the layouts of a group's observers at the first run; an error names its observer."""
        if group.is_laid_out:
            return
        for observer in group.observers:
            try:
                observer.values(flat)
            except BaseException as error:
                observer.explain(error, flat, ())
                raise
        group.is_laid_out = True


RESOURCE = tf.resource.as_datatype_enum
_handle_numbers = count(1)


class LentHandle:
    """Stores a handle until another node takes it, and returns a number for the handle."""

    # TensorFlow places a node on the device of the resource that it reads, so no node can read resources of
    # two devices. A node beside each resource passes on a number, which is on no device.

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Store the handle, the first tensor; return the number as a tensor in a list."""
        number = next(_handle_numbers)
        execution.store(_loan_key(number), flat[0])
        return [tf.constant(number, tf.int64)]


def resolve_handles(execution: Execution, flat: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return a node's inputs with lent handles, each taken once, instead of numbers at these positions."""
    if not positions:
        return flat
    tensors = list(flat)
    for i in positions:
        (tensors[i],) = execution.stored_values.pop(_loan_key(int(flat[i])))
    return tensors


def on_several_devices(ops: Iterable[tf.Operation]) -> bool:
    """Return True if the process or the operations have several devices."""
    if len(context.context().list_logical_devices()) > 1:
        return True
    return len({op.device for op in ops if op.device}) > 1


def _loan_key(number: int) -> tuple[str, int]:
    return "lent", number

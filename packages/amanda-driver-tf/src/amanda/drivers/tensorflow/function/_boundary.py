"""Stand-ins for TensorFlow's eager calls of functions, which call the instrumented copies."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Attributes, Execution, State
from amanda.errors import RoutineError
from amanda.graph import RewrittenCopy
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import dtypes, errors
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import gradients_util

from ..graph import GraphTensorOps, running
from ._copies import RegisteredCopy, call_unoptimized


class FunctionExecution(Execution):
    """An execution of a function, whose routines run on the threads that all functions share."""


def check_threads(function: Any) -> None:
    """Raise RoutineError if a routine calls a function while there is one thread: it would wait forever."""
    if isinstance(running.execution, FunctionExecution) and _number_of_threads() == 1:
        raise RoutineError(
            f"a routine calls the function {_user_name(function)}, which would wait forever for the only "
            "thread that TensorFlow has for ops, as the routine runs on it; before any op runs call "
            "tf.config.threading.set_inter_op_parallelism_threads(2), or set TF_NUM_INTEROP_THREADS=2 in the "
            "environment"
        )


@cache
def _number_of_threads() -> int:
    """Return the number of threads for ops: the configured one, or that of available processors."""
    requested = tf.config.threading.get_inter_op_parallelism_threads()
    environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if requested or (environment.isdigit() and int(environment)):
        return int(requested or environment)
    # Containers limit the processors of a process, which TensorFlow counts like this.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _user_name(function: Any) -> str:
    """Return the user's name of a function, without the runtime's prefix and counter."""
    name = function.decode() if isinstance(function, bytes) else str(function)
    return name.removeprefix("__inference_").removeprefix("__forward_").rpartition("_")[0] or name


_TENSORS = GraphTensorOps()
_INT64 = dtypes.int64.as_datatype_enum


class ForwardRecord:
    """A call of a forward function, recorded for the calls of its backward function.

    state_outside: the state in which the backward function runs once the scopes are closed.
    copy: the instrumented copy.  runs, stores: those of the execution.  atomic: the forward function, weakly.
    """

    def __init__(self, copy: RewrittenCopy[RegisteredCopy], execution: Execution, atomic: Any) -> None:
        # Without a stack, a backward pass after the scope reads the saved values, and calls no tool.
        self.state_outside = replace(execution.state, stack=None, scopes=())
        self.copy = copy
        self.runs = execution.runs
        # The values live as long as the tape holds the backward function, which holds this record.
        self.stores = execution.stores
        self.atomic = weakref.ref(atomic)


class _ThreadCalls(threading.local):
    """Calls of functions on a thread.

    pending: the function that TensorFlow is about to call, its copy and execution.
    last_record: the record of the forward call that ended last.
    forward_record: the record of the forward call whose backward function is being called.
    """

    def __init__(self) -> None:
        self.pending: tuple[bytes, RegisteredCopy, Execution] | None = None
        self.last_record: ForwardRecord | None = None
        self.forward_record: ForwardRecord | None = None


class FunctionBoundary:
    """Patches of TensorFlow's eager calls of functions.

    find_copy: returns the copy of a function for a state, arguments and the record of the forward call; None
    where the function runs uninstrumented.
    """

    def __init__(self, find_copy: Callable[..., RewrittenCopy[RegisteredCopy] | None]) -> None:
        self._find_copy = find_copy
        self._thread = _ThreadCalls()

    def patch(self, attributes: Attributes) -> None:
        """Patch the calls until `attributes` are restored."""
        self._patch_call_flat(attributes)
        self._patch_call_function(attributes)
        self._patch_backward_wrapper(attributes)

    def _patch_call_flat(self, attributes: Attributes) -> None:
        """Patch `AtomicFunction.call_flat`, which calls a function eagerly."""
        call = atomic_function.AtomicFunction.call_flat

        @functools.wraps(call)
        def call_flat(atomic: Any, *args: Any) -> Any:
            """Stand-in for `call_flat`: calls the copy of the function in a scope, in eager mode."""
            activation = interceptor.active()
            # A call within a graph is an operation of that graph, which is rewritten with it.
            if activation is None or not atomic._bound_context.executing_eagerly():
                return call(atomic, *args)
            return self._call_instrumented(activation.state, call, atomic, args)

        attributes.set(atomic_function.AtomicFunction, "call_flat", call_flat)

    def _call_instrumented(
        self, state: State, call: Callable[..., Any], atomic: Any, args: Sequence[Any]
    ) -> Any:
        """Call a function as its copy, and record a forward call; without a copy, call the function."""
        # Taken at once, so that no call within this call finds the record.
        forward_record, self._thread.forward_record = self._thread.forward_record, None
        self._thread.last_record = None
        copy = self._find_copy(state, atomic, args, forward_record)
        if copy is None:
            return call(atomic, *args)
        state.report_all(copy, copy.reports)
        # A forward function that runs as it is may still hand facts on to its backward function.
        if copy.runnable is None and copy.handed_on is None:
            return call(atomic, *args)
        execution = _execution_of(copy, state, forward_record)
        if copy.runnable is None:
            outputs = call(atomic, *args)
        else:
            outer, self._thread.pending = self._thread.pending, (atomic.name, copy.runnable, execution)
            try:
                with execution.under_way():
                    outputs = call(atomic, *args)
            finally:
                self._thread.pending = outer
        # TensorFlow wraps the backward function after the call has ended, so the record waits for that.
        if copy.handed_on is not None:
            self._thread.last_record = ForwardRecord(copy, execution, atomic)
        return outputs

    def _patch_call_function(self, attributes: Attributes) -> None:
        """Patch `Context.call_function`, which gives the runtime a function's name: it gets the copy's."""
        call = context.Context.call_function

        @functools.wraps(call)
        def call_function(current: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
            """Stand-in for `call_function`: calls the pending copy if the name is its function's."""
            pending = self._thread.pending
            check_threads(name)
            if pending is None or pending[0] != name:
                return call(current, name, tensor_inputs, num_outputs)
            # The copy may call functions itself, which are not the pending one.
            self._thread.pending = None
            _, copy, execution = pending
            return _call_copy(functools.partial(call, current), copy, execution, tensor_inputs, num_outputs)

        attributes.set(context.Context, "call_function", call_function)

    def _patch_backward_wrapper(self, attributes: Attributes) -> None:
        """Patch `_wrap_backward_function`, which makes the backward function that a tape records."""
        holder = concrete_function._TapeGradientFunctions
        wrap = holder._wrap_backward_function

        @functools.wraps(wrap)
        def wrap_backward_function(functions: Any, graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(functions, graph, self._with_record(functions, backward), outputs)

        attributes.set(holder, "_wrap_backward_function", wrap_backward_function)

    def _with_record(self, functions: Any, backward: Any) -> Any:
        """Return a backward function with the record of the last call, if it belongs to that call."""
        forward_record, self._thread.last_record = self._thread.last_record, None
        if forward_record is None or forward_record.atomic() is not functions._forward:
            return backward
        return _RecordedBackward(self, backward, forward_record)

    def call_backward(
        self, backward: Any, forward_record: ForwardRecord, tensors: list[Any], captures: list[Any]
    ) -> Any:
        """Call a backward function for a forward call, whose values its copy reads, also after the scope."""
        if (
            interceptor.active() is None
            and context.executing_eagerly()
            and forward_record.copy.runnable is not None
        ):
            return self._call_outside(backward, forward_record, tensors + captures)
        outer, self._thread.forward_record = self._thread.forward_record, forward_record
        try:
            return backward._call_flat(tensors, captures)
        finally:
            self._thread.forward_record = outer

    def _call_outside(self, backward: Any, forward_record: ForwardRecord, args: list[Any]) -> Any:
        """Call the copy of a backward function once the driver is detached, and record the call on tapes.

        Does what TensorFlow's `_call_flat` does, with the copy instead of the function.
        """
        recorded = None
        gradient_types = gradients_util.PossibleTapeGradientTypes(args)
        if gradient_types == gradients_util.POSSIBLE_GRADIENT_TYPES_NONE:
            atomic, arguments = backward._inference_function, args
        else:
            # A tape around the pass asks for second gradients, so the backward function needs one itself.
            recorded = backward._select_forward_and_backward_functions(args, gradient_types, True)
            atomic, arguments = recorded.forward()
        state = forward_record.state_outside
        copy = self._find_copy(state, atomic, arguments, forward_record)
        if copy is None or copy.runnable is None:
            return backward._call_flat(args, [])
        execution = _execution_of(copy, state, forward_record)
        call, count = context.context().call_function, len(atomic.function_type.flat_outputs)
        with record.stop_recording(), execution.under_way():
            outputs = _call_copy(call, copy.runnable, execution, arguments, count)
        if recorded is not None:
            self._thread.last_record = ForwardRecord(copy, execution, atomic)
            self._record_call(recorded, outputs)
        return backward.function_type.pack_output(outputs)

    def _record_call(self, recorded: Any, outputs: Any) -> None:
        """Record a call on the tapes; its backward function gets the record of this call."""
        functions = recorded._functions
        wrap = functions._wrap_backward_function

        def wrap_backward_function(graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(graph, self._with_record(functions, backward), outputs)

        # An attribute of the instance hides the method for the one call of `record`.
        functions._wrap_backward_function = wrap_backward_function
        try:
            recorded.record(outputs)
        finally:
            del functions._wrap_backward_function


def _execution_of(
    copy: RewrittenCopy[RegisteredCopy], state: State, forward_record: ForwardRecord | None
) -> FunctionExecution:
    """Return an execution of a copy; of a backward function with the stored values of its forward call."""
    if forward_record is None:
        return FunctionExecution(state, _TENSORS, copy.table)
    return FunctionExecution(
        state, _TENSORS, copy.table, forward_record.runs, every=False, stores=forward_record.stores
    )


class _RecordedBackward:
    """A backward function together with the record of the forward call that it belongs to."""

    def __init__(self, boundary: FunctionBoundary, backward: Any, forward_record: ForwardRecord) -> None:
        self._boundary = boundary
        self._backward = backward
        self._forward_record = forward_record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backward, name)

    def _call_flat(self, tensors: list[Any], captures: list[Any]) -> Any:
        return self._boundary.call_backward(self._backward, self._forward_record, tensors, captures)


def _call_copy(
    call: Callable[..., Any], copy: RegisteredCopy, execution: Execution, args: Sequence[Any], count: int
) -> Any:
    """Call a copy with the execution's number as last argument; errors name the function."""
    # The constructor is faster than `tf.constant`.
    number = EagerTensor(execution.number, context.context().device_name, _INT64)
    arguments = copy.name, [*args, number], count
    try:
        return call_unoptimized(call, *arguments) if copy.skips_optimizer else call(*arguments)
    except errors.OpError as error:
        copy.rename_in_error(error)
        raise

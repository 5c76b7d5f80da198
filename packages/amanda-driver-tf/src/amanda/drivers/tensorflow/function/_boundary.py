"""Eager calls of functions, which become calls of their instrumented copies."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from amanda import interceptor
from amanda.backend import Attributes, Execution, State
from amanda.graph import Copy
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import dtypes, errors
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import gradients_util

from ..graph import GraphTensors
from ._copies import Runnable
from ._options import unoptimized
from ._threads import Call, check_threads

_TENSORS = GraphTensors()
_INT64 = dtypes.int64.as_datatype_enum


class Trace:
    """The record that the call of a forward function leaves for that of its backward function.

    outside: the state in which the backward function runs once the scopes are closed.
    """

    def __init__(self, copy: Copy[Runnable], execution: Execution, atomic: Any) -> None:
        self.outside = replace(execution.state, stack=None, scopes=())
        self.copy = copy
        self.runs = execution.runs
        self.stores = execution.stores
        self.atomic = weakref.ref(atomic)


class _Thread(threading.local):
    """State of one thread: the call that is under way, and the traces of the last and the forward call.

    pending: the call whose function is to be exchanged.  last: the trace of the call that ended last.
    trace: that of the forward call whose backward function runs.
    """

    def __init__(self) -> None:
        self.pending: tuple[bytes, Runnable, Execution] | None = None
        self.last: Trace | None = None
        self.trace: Trace | None = None


class Boundary:
    """Stands where functions are called.

    copy: makes or finds the copy of a function, for a state, arguments and the trace of the forward call;
    None where the function is left as it is.
    """

    def __init__(self, copy: Callable[..., Copy[Runnable] | None]) -> None:
        self._copy = copy
        self._thread = _Thread()

    def enter(self, attributes: Attributes) -> None:
        """Take every call until the attributes are restored."""
        self._follow_calls(attributes)
        self._exchange_names(attributes)
        self._follow_backward(attributes)

    def _follow_calls(self, attributes: Attributes) -> None:
        call = atomic_function.AtomicFunction.call_flat

        @functools.wraps(call)
        def call_flat(atomic: Any, *args: Any) -> Any:
            activation = interceptor.active()
            if activation is None or not atomic._bound_context.executing_eagerly():
                return call(atomic, *args)
            return self._call(activation.state, call, atomic, args)

        attributes.set(atomic_function.AtomicFunction, "call_flat", call_flat)

    def _call(self, state: State, call: Callable[..., Any], atomic: Any, args: Sequence[Any]) -> Any:
        trace, self._thread.trace = self._thread.trace, None
        self._thread.last = None
        copy = self._copy(state, atomic, args, trace)
        if copy is None:
            return call(atomic, *args)
        state.report_all(copy, copy.reports)
        if copy.runnable is None and copy.handed_on is None:
            return call(atomic, *args)
        if trace is None:
            execution = Call(state, _TENSORS, copy.table)
        else:
            execution = Call(state, _TENSORS, copy.table, trace.runs, False, trace.stores)
        if copy.runnable is None:
            outputs = call(atomic, *args)
        else:
            before, self._thread.pending = self._thread.pending, (atomic.name, copy.runnable, execution)
            try:
                with execution.under_way():
                    outputs = call(atomic, *args)
            finally:
                self._thread.pending = before
        if copy.handed_on is not None:
            self._thread.last = Trace(copy, execution, atomic)
        return outputs

    def _exchange_names(self, attributes: Attributes) -> None:
        call = context.Context.call_function

        @functools.wraps(call)
        def call_function(current: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
            pending = self._thread.pending
            check_threads(name)
            if pending is None or pending[0] != name:
                return call(current, name, tensor_inputs, num_outputs)
            self._thread.pending = None
            _, copy, execution = pending
            return _call_copy(functools.partial(call, current), copy, execution, tensor_inputs, num_outputs)

        attributes.set(context.Context, "call_function", call_function)

    def _follow_backward(self, attributes: Attributes) -> None:
        holder = concrete_function._TapeGradientFunctions
        wrap = holder._wrap_backward_function

        @functools.wraps(wrap)
        def wrap_backward_function(functions: Any, graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(functions, graph, self._traced(functions, backward), outputs)

        attributes.set(holder, "_wrap_backward_function", wrap_backward_function)

    def _traced(self, functions: Any, backward: Any) -> Any:
        """A backward function that is to be recorded; for the call that has just ended, if it is of that."""
        trace, self._thread.last = self._thread.last, None
        if trace is None or trace.atomic() is not functions._forward:
            return backward
        return _Traced(self, backward, trace)

    def call_backward(self, backward: Any, trace: Trace, tensors: list[Any], captures: list[Any]) -> Any:
        """Call a backward function for a forward call; it reads what that kept, also after the scope."""
        if interceptor.active() is None and context.executing_eagerly() and trace.copy.runnable is not None:
            return self._call_outside(backward, trace, tensors + captures)
        before, self._thread.trace = self._thread.trace, trace
        try:
            return backward._call_flat(tensors, captures)
        finally:
            self._thread.trace = before

    def _call_outside(self, backward: Any, trace: Trace, args: list[Any]) -> Any:
        """As `_call_flat`, where no one stands at the boundary: a tape around records it as it would."""
        recorded = None
        watched = gradients_util.PossibleTapeGradientTypes(args)
        if watched == gradients_util.POSSIBLE_GRADIENT_TYPES_NONE:
            atomic, given = backward._inference_function, args
        else:
            recorded = backward._select_forward_and_backward_functions(args, watched, True)
            atomic, given = recorded.forward()
        state = trace.outside
        copy = self._copy(state, atomic, given, trace)
        if copy is None or copy.runnable is None:
            return backward._call_flat(args, [])
        execution = Call(state, _TENSORS, copy.table, trace.runs, False, trace.stores)
        call, count = context.context().call_function, len(atomic.function_type.flat_outputs)
        with record.stop_recording(), execution.under_way():
            outputs = _call_copy(call, copy.runnable, execution, given, count)
        if recorded is not None:
            self._thread.last = Trace(copy, execution, atomic)
            self._record(recorded, outputs)
        return backward.function_type.pack_output(outputs)

    def _record(self, recorded: Any, outputs: Any) -> None:
        """Record a call on the tapes, for a backward function that reads what this call kept."""
        functions = recorded._functions
        wrap = functions._wrap_backward_function

        def wrap_backward_function(graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(graph, self._traced(functions, backward), outputs)

        functions._wrap_backward_function = wrap_backward_function
        try:
            recorded.record(outputs)
        finally:
            del functions._wrap_backward_function


class _Traced:
    """A backward function, called for one call of its forward function."""

    def __init__(self, boundary: Boundary, backward: Any, trace: Trace) -> None:
        self._boundary = boundary
        self._backward = backward
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backward, name)

    def _call_flat(self, tensors: list[Any], captures: list[Any]) -> Any:
        return self._boundary.call_backward(self._backward, self._trace, tensors, captures)


def _call_copy(
    call: Callable[..., Any], copy: Runnable, execution: Execution, args: Sequence[Any], count: int
) -> Any:
    number = EagerTensor(execution.number, context.context().device_name, _INT64)
    given = copy.name, [*args, number], count
    try:
        return unoptimized(call, *given) if copy.torn else call(*given)
    except errors.OpError as error:
        copy.in_vanilla_terms(error)
        raise

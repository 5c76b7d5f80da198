"""Where a function is called eagerly, the call of its instrumented copy."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda import interceptor
from amanda.backend import Attributes, Execution, Namespace, State
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import constant_op, dtypes, errors

from ..graph import GraphTensors
from ._copies import Copies, Copy

_TENSORS = GraphTensors()


class Trace:
    """What the call of a forward function leaves for that of its backward function."""

    def __init__(self, copy: Copy, execution: Execution, atomic: Any) -> None:
        self.copy = copy
        self.layer = copy.layer
        self.runs = execution.runs
        self.stores = execution.stores
        self.atomic = weakref.ref(atomic)


class _Thread(threading.local):
    """What is under way on a thread.

    pending: the call whose function is to be exchanged.  last: the trace of the call that ended last.
    trace: that of the forward call whose backward function runs.
    """

    def __init__(self) -> None:
        self.pending: tuple[bytes, Copy, Execution] | None = None
        self.last: Trace | None = None
        self.trace: Trace | None = None


class Boundary:
    """Stands where functions are called."""

    def __init__(self, namespace: Namespace, budget: Callable[[], int]) -> None:
        self._copies = Copies(namespace, budget)
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
        with interceptor.Suspension(), context.eager_mode(), record.stop_recording():
            copy = self._copies.of(state, atomic, args, trace)
        if copy is None:
            return call(atomic, *args)
        for entry in copy.reports:
            state.report(*entry)
        if trace is None:
            execution = Execution(state, _TENSORS, copy.table)
        else:
            execution = Execution(state, _TENSORS, copy.table, trace.runs, False, trace.stores)
        if copy.name is None:
            outputs = call(atomic, *args)
        else:
            with execution.under_way(), self._pending(atomic, copy, execution):
                outputs = call(atomic, *args)
        if copy.forward:
            self._thread.last = Trace(copy, execution, atomic)
        return outputs

    @contextmanager
    def _pending(self, atomic: Any, copy: Copy, execution: Execution) -> Iterator[None]:
        before, self._thread.pending = self._thread.pending, (atomic.name, copy, execution)
        try:
            yield
        finally:
            self._thread.pending = before

    def _exchange_names(self, attributes: Attributes) -> None:
        call = context.Context.call_function

        @functools.wraps(call)
        def call_function(current: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
            pending = self._thread.pending
            if pending is None or pending[0] != name:
                return call(current, name, tensor_inputs, num_outputs)
            self._thread.pending = None
            _, copy, execution = pending
            number = constant_op.constant(execution.number, dtypes.int64)
            try:
                return call(current, copy.name, [*tensor_inputs, number], num_outputs)
            except errors.OpError as error:
                copy.in_vanilla_terms(error)
                raise

        attributes.set(context.Context, "call_function", call_function)

    def _follow_backward(self, attributes: Attributes) -> None:
        holder = concrete_function._TapeGradientFunctions
        wrap = holder._wrap_backward_function
        thread = self._thread

        @functools.wraps(wrap)
        def wrap_backward_function(functions: Any, graph: Any, backward: Any, outputs: Any) -> Any:
            run, recorded = wrap(functions, graph, backward, outputs)
            trace, thread.last = thread.last, None
            if trace is None or trace.atomic() is not functions._forward:
                return run, recorded

            @functools.wraps(run)
            def run_traced(*gradients: Any) -> Any:
                before, thread.trace = thread.trace, trace
                try:
                    return run(*gradients)
                finally:
                    thread.trace = before

            return run_traced, recorded

        attributes.set(holder, "_wrap_backward_function", wrap_backward_function)

"""Stand-ins for TensorFlow's eager calls of functions, and the instrumented copies that they call.

A copy in which no operators can be fused runs without TensorFlow's graph optimizer.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Execution, OpFacts, Patches, State
from amanda.errors import RoutineError
from amanda.graph import RewrittenCopy
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import dtypes, errors
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import gradients_util

from ..graph import GraphTensorOps, Location, TensorFlowRewriting, facts_of, grouped_outputs, running


class RegisteredCopy:
    """A copy of a function that is registered with the runtime.

    name: the copy's name.  vanilla: the function's name.
    skips_optimizer: True if routines lie between nearly all operators, so that grappler can fuse none.
    """

    def __init__(self, vanilla: str, definitions: Sequence[Any]) -> None:
        """Register the copy, the last of these definitions, and the functions that it calls."""
        self._vanilla = vanilla
        self.skips_optimizer = is_unfusable(definitions)
        self._handles: list[Any] = []
        runtime = context.context()
        for definition in definitions:
            self.name = definition.signature.name.encode()
            # A name contains a digest of the content, so a function of that name is the same copy.
            if not runtime.has_function(self.name):
                runtime.add_function_def(definition)
            # The runtime drops a function with its last AtomicFunction.
            self._handles.append(atomic_function.AtomicFunction(self.name, runtime, None))

    def rename_in_error(self, error: Any) -> None:
        """Replace the copy's name in an operation's error by the function's."""
        error._message = error._message.replace(self.name.decode(), self._vanilla)


class ForwardFacts:
    """Results of rewriting a forward function that the rewriting of its backward functions needs.

    identity: of the function's graph.  plans: of its operations, by their ids.
    tables: those tables of `TensorFlowRewriting` that are about forward operations, by attribute.
    location_by_id_by_op: for each id of an operation, the layers around it; weak in the operations.
    callee_graphs_by_op: weak references to the graphs of the functions that an operation calls, by place;
    weak in the operations.
    """

    _TABLES = (
        "saved_tensor_by_read", "saved_tensors_by_input", "autodiff_places", "loop_depth_by_op_id",
    )  # fmt: skip

    def __init__(self, rewriting: TensorFlowRewriting, identity: int) -> None:
        self.identity = identity
        self.plans = rewriting.analysis.plans
        self.tables = {name: getattr(rewriting, name) for name in self._TABLES}
        self.location_by_id_by_op: weakref.WeakKeyDictionary[Any, dict[int, Location]]
        self.location_by_id_by_op = weakref.WeakKeyDictionary()
        for op, facts_by_id in rewriting.facts_by_id_by_op.items():
            self.location_by_id_by_op[op] = {
                op_id: Location(facts.scope, facts.scope_aliases) for op_id, facts in facts_by_id.items()
            }
        self.callee_graphs_by_op: weakref.WeakKeyDictionary[Any, dict[str, Any]]
        self.callee_graphs_by_op = weakref.WeakKeyDictionary()
        for op, graphs in rewriting.callee_graphs_by_op.items():
            # Graphs die with their functions; a plan must not keep them.
            self.callee_graphs_by_op[op] = {place: weakref.ref(graph) for place, graph in graphs.items()}

    def copy_into(self, rewriting: TensorFlowRewriting) -> None:
        """Copy the facts of the forward operations into the rewriting of a backward function.

        The rewriting then also finds forward operations here; graphs that are gone are None in it.
        """
        rewriting.analysis.plans.update(self.plans)
        for attribute, table in self.tables.items():
            # Tables of several calls may be merged: op ids differ from call to call.
            getattr(rewriting, attribute).update(table)
        for op, graph_references in self.callee_graphs_by_op.items():
            rewriting.callee_graphs_by_op[op] = {place: ref() for place, ref in graph_references.items()}
        rewriting.find_earlier_forward = lambda op, op_id: self._find_forward(rewriting, op, op_id)

    def _find_forward(
        self, rewriting: TensorFlowRewriting, op: Any, op_id: int | None
    ) -> tuple[int, OpFacts] | None:
        """Return op id and facts of a forward operation; None for others.

        op_id: if None or unknown, that of the operation's last call.
        """
        location_by_id = self.location_by_id_by_op.get(op)
        if not location_by_id:
            return None
        if op_id is None or op_id not in location_by_id:
            op_id = next(reversed(location_by_id))
        facts = facts_of(op, op_id, rewriting.namespace, location=location_by_id[op_id])
        facts.outputs = grouped_outputs(op, op.node_def)
        return op_id, facts


_CALLBACK = "EagerPyFunc"
_DEFAULT = rewriter_config_pb2.RewriterConfig()


def is_unfusable(definitions: Sequence[Any]) -> bool:
    """Return True if functions have as many calls of Python as operators, so that none can be fused."""
    types = [node.op for definition in definitions for node in definition.node_def]
    # A call of Python for each operator is half of all nodes.
    return 2 * types.count(_CALLBACK) >= len(types)


def call_unoptimized(call: Callable[..., Any], *args: Any) -> Any:
    """Call the runtime without its graph optimizer, which takes most of the time of a first call.

    Options of the optimizer that the user has set stay.
    """
    runtime = context.context()
    earlier_options = runtime.function_call_options
    # The options are those of a thread, so calls on other threads keep theirs.
    runtime.function_call_options = _options_without_optimizer(
        earlier_options.config_proto_serialized, earlier_options.executor_type
    )
    try:
        return call(*args)
    finally:
        runtime.function_call_options = earlier_options


@lru_cache(maxsize=16)
def _options_without_optimizer(serialized: bytes, executor_type: str | None) -> Any:
    """Return these options without the optimizer, unless the user has set options of the optimizer."""
    config = config_pb2.ConfigProto.FromString(serialized)
    optimizer_options = config.graph_options.rewrite_options
    if optimizer_options == _DEFAULT:
        optimizer_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor_type, config)


class FunctionExecution(Execution):
    """An execution of a function, whose routines run on the threads that all functions share."""


def _check_threads(function: Any) -> None:
    """Raise RoutineError if a routine calls `function` on the only thread for ops: it would hang."""
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
    requested_count = tf.config.threading.get_inter_op_parallelism_threads()
    count_in_environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if requested_count or (count_in_environment.isdigit() and int(count_in_environment)):
        return int(requested_count or count_in_environment)
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
    copy: the instrumented copy.  run_dicts, stored_values: those of the execution.
    find_atomic: returns the forward function, None if that is gone.
    """

    def __init__(self, copy: RewrittenCopy[RegisteredCopy], execution: Execution, atomic: Any) -> None:
        # Without a stack, a backward pass after the scope reads the saved values, and calls no tool.
        self.state_outside = replace(execution.state, stack=None, scopes=())
        self.copy = copy
        self.run_dicts = execution.run_dicts
        # The values live as long as the tape holds the backward function, which holds this record.
        self.stored_values = execution.stored_values
        self.find_atomic = weakref.ref(atomic)


class _PendingCall(NamedTuple):
    """The runtime name of a function, and the copy and execution by which it is to run."""

    function_name: bytes
    copy: RegisteredCopy
    execution: Execution


class _ThreadCalls(threading.local):
    """Calls of functions on a thread.

    pending_call: the copy that is to run instead of the function that TensorFlow is about to call.
    last_record: the record of the forward call that ended last.
    forward_record: the record of the forward call whose backward function is being called.
    """

    def __init__(self) -> None:
        self.pending_call: _PendingCall | None = None
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

    def patch(self, patches: Patches) -> None:
        """Patch the calls until `patches` are restored."""
        self._patch_call_flat(patches)
        self._patch_call_function(patches)
        self._patch_backward_wrapper(patches)

    def _patch_call_flat(self, patches: Patches) -> None:
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

        patches.set(atomic_function.AtomicFunction, "call_flat", call_flat)

    def _call_instrumented(
        self, state: State, call: Callable[..., Any], atomic: Any, args: Sequence[Any]
    ) -> Any:
        """Call a function as its copy, if any; record a call that may be differentiated as the last.

        Adds the copy's reports to those of the scope.
        """
        # Reset at once, so that no call within this call finds the record of its forward call.
        forward_record, self._thread.forward_record = self._thread.forward_record, None
        self._thread.last_record = None
        copy = self._find_copy(state, atomic, args, forward_record)
        if copy is None:
            return call(atomic, *args)
        state.report_all(copy, copy.reports)
        # A forward function that runs as it is may still hand facts on to its backward function.
        if copy.runnable is None and copy.gradient_data is None:
            return call(atomic, *args)
        execution = _execution_of(copy, state, forward_record)
        if copy.runnable is None:
            outputs = call(atomic, *args)
        else:
            outer_call = self._thread.pending_call
            self._thread.pending_call = _PendingCall(atomic.name, copy.runnable, execution)
            try:
                with execution.running():
                    outputs = call(atomic, *args)
            finally:
                self._thread.pending_call = outer_call
        # TensorFlow wraps the backward function after the call has ended, so the record waits for that.
        if copy.gradient_data is not None:
            self._thread.last_record = ForwardRecord(copy, execution, atomic)
        return outputs

    def _patch_call_function(self, patches: Patches) -> None:
        """Patch `Context.call_function`, which gives the runtime a function's name: it gets the copy's."""
        call = context.Context.call_function

        @functools.wraps(call)
        def call_function(runtime: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
            """Stand-in for `call_function`: calls the pending copy if the name is its function's.

            Raises RoutineError for a call in a routine that would wait for its own thread.
            """
            pending_call = self._thread.pending_call
            _check_threads(name)
            if pending_call is None or pending_call.function_name != name:
                return call(runtime, name, tensor_inputs, num_outputs)
            # The copy may call functions itself, which are not the pending one.
            self._thread.pending_call = None
            call_by_name = functools.partial(call, runtime)
            return _call_copy(
                call_by_name, pending_call.copy, pending_call.execution, tensor_inputs, num_outputs
            )

        patches.set(context.Context, "call_function", call_function)

    def _patch_backward_wrapper(self, patches: Patches) -> None:
        """Patch `_wrap_backward_function`, which makes the backward function that a tape records."""
        holder = concrete_function._TapeGradientFunctions
        wrap = holder._wrap_backward_function

        @functools.wraps(wrap)
        def wrap_backward_function(functions: Any, graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(functions, graph, self._with_last_record(functions, backward), outputs)

        patches.set(holder, "_wrap_backward_function", wrap_backward_function)

    def _with_last_record(self, functions: Any, backward: Any) -> Any:
        """Return a backward function that runs with the record of the last forward call; reset the record.

        The function is returned as it is if that call was of another function.
        """
        forward_record, self._thread.last_record = self._thread.last_record, None
        if forward_record is None or forward_record.find_atomic() is not functions._forward:
            return backward
        return _RecordedBackward(self, backward, forward_record)

    def call_backward(
        self, backward: Any, forward_record: ForwardRecord, tensors: list[Any], captures: list[Any]
    ) -> Any:
        """Call a backward function for a forward call, whose values its copy reads, also after the scope."""
        is_after_scope = interceptor.active() is None and context.executing_eagerly()
        if is_after_scope and forward_record.copy.runnable is not None:
            return self._call_after_scope(backward, forward_record, tensors + captures)
        outer_record, self._thread.forward_record = self._thread.forward_record, forward_record
        try:
            return backward._call_flat(tensors, captures)  # the stand-in for `call_flat` reads the record
        finally:
            self._thread.forward_record = outer_record

    def _call_after_scope(self, backward: Any, forward_record: ForwardRecord, args: list[Any]) -> Any:
        """Call the copy of a backward function once the driver is detached, and record the call on tapes.

        Does what TensorFlow's `_call_flat` does, with the copy instead of the function.  Without a copy calls
        the function.
        """
        forward_backward = None  # TensorFlow's pair of functions for a call that tapes record
        gradient_types = gradients_util.PossibleTapeGradientTypes(args)
        if gradient_types == gradients_util.POSSIBLE_GRADIENT_TYPES_NONE:
            atomic, arguments = backward._inference_function, args
        else:
            # A tape around the pass asks for second gradients, so the backward function needs one itself.
            forward_backward = backward._select_forward_and_backward_functions(args, gradient_types, True)
            atomic, arguments = forward_backward.forward()
        state = forward_record.state_outside
        copy = self._find_copy(state, atomic, arguments, forward_record)
        if copy is None or copy.runnable is None:
            return backward._call_flat(args, [])
        execution = _execution_of(copy, state, forward_record)
        call_by_name = context.context().call_function
        output_count = len(atomic.function_type.flat_outputs)
        with record.stop_recording(), execution.running():
            outputs = _call_copy(call_by_name, copy.runnable, execution, arguments, output_count)
        if forward_backward is not None:
            self._thread.last_record = ForwardRecord(copy, execution, atomic)
            self._record_call(forward_backward, outputs)
        return backward.function_type.pack_output(outputs)

    def _record_call(self, forward_backward: Any, outputs: Any) -> None:
        """Record a call on the tapes; its backward function gets `last_record`, the record of this call."""
        functions = forward_backward._functions
        wrap = functions._wrap_backward_function

        def wrap_backward_function(graph: Any, backward: Any, outputs: Any) -> Any:
            return wrap(graph, self._with_last_record(functions, backward), outputs)

        # An attribute of the instance hides the method for the one call of `record`.
        functions._wrap_backward_function = wrap_backward_function
        try:
            forward_backward.record(outputs)
        finally:
            del functions._wrap_backward_function


def _execution_of(
    copy: RewrittenCopy[RegisteredCopy], state: State, forward_record: ForwardRecord | None
) -> FunctionExecution:
    """Return an execution of a copy; for a backward function, with the values that its forward call left.

    In a backward function only tools whose scope is open run their routines.
    """
    if forward_record is None:
        return FunctionExecution(state, _TENSORS, copy.table)
    return FunctionExecution(
        state,
        _TENSORS,
        copy.table,
        forward_record.run_dicts,
        runs_all_tools=False,
        stored_values=forward_record.stored_values,
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
    call: Callable[..., Any], copy: RegisteredCopy, execution: Execution, args: Sequence[Any],
    output_count: int,
) -> Any:  # fmt: skip
    """Call a copy by `call`, with the execution's number as last argument; errors name the function.

    The graph optimizer is left out for a copy that skips it.
    """
    # The constructor is faster than `tf.constant`.
    number = EagerTensor(execution.number, context.context().device_name, _INT64)
    arguments = copy.name, [*args, number], output_count
    try:
        return call_unoptimized(call, *arguments) if copy.skips_optimizer else call(*arguments)
    except errors.OpError as error:
        copy.rename_in_error(error)
        raise

"""Requirements of each mode on a version of TensorFlow: undocumented names, and a program that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from amanda.backend import SelfTestProgram
from tensorflow.python.eager import context

NEWEST_TESTED = "2.21"

# Private names of TensorFlow. A version without one of them leaves the mode off as a whole, and the other
# modes on.
_ENGINE = (
    "eager.context:Context.add_function_def",
    "eager.context:Context.get_function_def",
    "eager.backprop:GradientTape._pop_tape",
    "eager.backprop:GradientTape._push_tape",
    "eager.context:eager_mode",
    "eager.record:stop_recording",
    "framework.function_def_to_graph:function_def_to_graph",
    "framework.op_def_registry:get",
    "ops.script_ops:EagerFunc",
    "ops.script_ops:_py_funcs.insert",
)
_SESSION = (
    "_Callable.__call__",
    "_call_tf_sessionprun",
    "_call_tf_sessionrun",
    "_do_call",
    "_extend_graph",
    "_make_callable_from_options",
)
_IMPORT = (
    "GraphImportGraphDefWithResults",
    "ImportGraphDefOptionsAddInputMapping",
    "ImportGraphDefOptionsAddReturnOperation",
    "ImportGraphDefOptionsRemapControlDependency",
    "ImportGraphDefOptionsSetValidateColocationConstraints",
    "ImportGraphDefResultsReturnOperations",
    "OperationName",
    "Output",
)
_BY_MODE: dict[str, tuple[str, ...]] = {
    "graph": (
        *_ENGINE,
        *(f"client.session:BaseSession.{name}" for name in _SESSION),
        *(f"client.pywrap_tf_session:TF_{name}" for name in _IMPORT),
        "framework.c_api_util:ScopedTFImportGraphDefOptions",
        "framework.c_api_util:ScopedTFImportGraphDefResults",
        "framework.ops:Graph._as_graph_def",
        "framework.ops:Graph._c_graph",
        "framework.ops:Graph._mutation_lock",
        "framework.ops:Graph.new_operations",
        "framework.ops:Operation._control_outputs",
        "framework.ops:SymbolicTensor.consumers",
    ),
    "saved_model": (
        *_ENGINE,
        "checkpoint.checkpoint_options:CheckpointOptions",
        "saved_model.fingerprinting_utils:write_fingerprint",
        "saved_model.load:Loader",
        "saved_model.loader_impl:parse_saved_model",
    ),
    "function": (
        *_ENGINE,
        "eager.context:Context.call_function",
        "eager.execute:record_gradient",
        "eager.polymorphic_function.atomic_function:AtomicFunction.call_flat",
        "eager.polymorphic_function.concrete_function:_TapeGradientFunctions._wrap_backward_function",
        "eager.polymorphic_function.concrete_function:ConcreteFunction._select_forward_and_backward_functions",
        "eager.record:record_operation",
        "eager.record:record_operation_backprop_only",
        "eager.record:record_operation_forwardprop_only",
        "framework.ops:Graph._create_op_internal",
        "framework.ops:Graph._original_op",
        "ops.gradients_util:PossibleTapeGradientTypes",
    ),
    "eager": (
        "data.ops.iterator_ops:OwnedIterator._create_iterator",
        "data.ops.iterator_ops:OwnedIterator._next_internal",
        "eager.backprop:GradientTape._pop_tape",
        "eager.backprop:GradientTape._push_tape",
        "eager.backprop:_gradient_function",
        "eager.core:_FallbackException",
        "eager.execute:execute",
        "eager.execute:quick_execute",
        "eager.execute:record_gradient",
        "eager.forwardprop:_jvp_dispatch",
        "eager.imperative_grad:imperative_grad",
        "eager.record:record_operation",
        "framework.op_def_registry:get",
        "framework.ops:EagerTensor._datatype_enum",
        "framework.ops:EagerTensor._id",
        "framework.ops:EagerTensor._rank",
        "framework.ops:get_name_scope",
        "framework.ops:uid",
        "ops.custom_gradient:recompute_grad",
        "pywrap_tfe:TFE_Py_FastPathExecute",
        "pywrap_tfe:TFE_Py_RecordGradient",
        "pywrap_tfe:TFE_Py_RegisterGradientFunction",
        "pywrap_tfe:TFE_Py_RegisterJVPFunction",
        "pywrap_tfe:TFE_Py_TapeSetIsEmpty",
        "pywrap_tfe:TFE_Py_TapeSetIsStopped",
        "pywrap_tfe:TFE_Py_TapeSetRecordOperation",
        "pywrap_tfe:TFE_Py_TapeSetRestartOnThread",
        "pywrap_tfe:TFE_Py_TapeSetShouldRecordBackprop",
        "pywrap_tfe:TFE_Py_TapeSetStopOnThread",
    ),
}
"""By mode, the private names below `tensorflow.python` that it needs, as "module:attribute"."""
PRIVATE_NAMES = {
    mode: tuple(f"tensorflow.python.{name}" for name in names) for mode, names in _BY_MODE.items()
}


_INPUT_VALUES = (0.5, -0.25)
"""The input of the programs of one op and its gradient."""


def eager_self_test() -> SelfTestProgram | None:
    """Return the program for eager mode; None where the program has switched eager mode off."""
    return SelfTestProgram(lambda: _compute_eagerly(tf.tanh), "Tanh", "Tanh") if _is_eager() else None


def function_self_test() -> SelfTestProgram | None:
    """Return the program for functions; None where the program has switched eager mode off."""
    return SelfTestProgram(lambda: _compute_eagerly(_new_function()), "Tanh", "Tanh") if _is_eager() else None


def session_self_test() -> SelfTestProgram:
    """Return the program for sessions."""
    return SelfTestProgram(_compute_tanh_in_session, "Tanh", "Tanh")


def _new_function() -> Callable[[Any], Any]:
    """Return a function that was never traced: a traced one would be found in a cache."""
    function: Callable[[Any], Any] = tf.function(lambda x: tf.tanh(x))
    return function


def _is_eager() -> bool:
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _compute_eagerly(function: Callable[[Any], Any]) -> list[float]:
    """Return a function's result and gradient at `_INPUT_VALUES`, also while a graph is being built."""
    # Not `tf.init_scope`, in which no tape records.
    with context.eager_mode(), tf.device("CPU"):
        x = tf.constant(_INPUT_VALUES, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [*y.numpy().tolist(), *tape.gradient(y, x).numpy().tolist()]


def _compute_tanh_in_session() -> list[float]:
    """Return the tanh of `_INPUT_VALUES` and its gradient, from a session of a new graph."""
    graph = tf.Graph()
    with graph.as_default(), tf.device("CPU"):
        x = tf.constant(_INPUT_VALUES, tf.float64)
        y = tf.tanh(x)
        (gradient,) = tf.gradients(y, x)
    with tf.compat.v1.Session(graph=graph) as session:
        return [number for array in session.run([y, gradient]) for number in array.tolist()]

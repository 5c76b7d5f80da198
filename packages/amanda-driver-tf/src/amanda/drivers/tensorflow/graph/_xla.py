"""Trials of functions with `jit_compile=True`: whether TensorFlow can run them without XLA, as copies run.

XLA has kernels that TensorFlow lacks, such as grouped convolutions in three dimensions on a CPU. A table of
these would never be complete, so each traced function is run once without XLA, on copies of its variables,
before it is rewritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import errors, ops
from tensorflow.python.ops import handle_data_util

from ._functions import GraphFunction, function_named

MUST_COMPILE = "_XlaMustCompile"
_EXTENTS = (8, 1, 2, 32)
"""Sizes for unknown extents of arguments, such as a batch size, which are tried in this order."""

RUNS_IN_XLA_ALONE = "it has jit_compile=True and fails without XLA, so that it runs uninstrumented"

_numbers = count()
_results: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def must_compile(holder: Any) -> bool:
    """Return True for a FunctionDef, or a node that calls a function, with jit_compile=True."""
    return MUST_COMPILE in holder.attr and bool(holder.attr[MUST_COMPILE].b)


def runs_without_xla(function: GraphFunction, read_argument: Callable[[int], Any]) -> bool:
    """Return True if TensorFlow can run a function without XLA.

    read_argument: returns the value of an argument, by position; zeros are used for a symbol.
    """
    if function.graph not in _results:
        values = [read_argument(i) for i in range(len(function.graph.inputs))]
        is_known = all(isinstance(value, ops.EagerTensor) for value in values)
        extents = _EXTENTS[:1] if is_known else _EXTENTS
        _results[function.graph] = any(_try_without_xla(function, values, extent) for extent in extents)
    return _results[function.graph]


def _try_without_xla(function: GraphFunction, values: list[Any], extent: int) -> bool:
    """Run a function without XLA on arguments, and drop the results; return False if it fails."""
    definitions: dict[str, Any] = {}
    name = _add_trial_definition(function, definitions)
    current = context.context()
    handles = []
    for definition in definitions.values():
        current.add_function_def(definition)
        handles.append(atomic_function.AtomicFunction(definition.signature.name.encode(), current, None))
    variables: list[Any] = []
    try:
        pairs = zip(function.graph.inputs, values, strict=True)
        arguments = [_trial_argument(symbol, value, extent, variables) for symbol, value in pairs]
        # The runtime is called directly, so that no tape or scope sees the trial.
        current.call_function(name.encode(), arguments, len(function.definition.signature.output_arg))
    except (errors.OpError, ValueError, TypeError):
        return False
    finally:
        for handle in variables:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
    return True


def _add_trial_definition(function: GraphFunction, definitions: dict[str, Any]) -> str:
    """Add a function and those that it calls without attributes for XLA; return its new name."""
    if function.name in definitions:
        return str(definitions[function.name].signature.name)
    plain = definitions[function.name] = function_pb2.FunctionDef()
    plain.CopyFrom(function.definition)
    plain.signature.name = f"{function.name}_amanda_trial_{next(_numbers)}"
    _remove_xla_marks(plain.attr)
    for node in plain.node_def:
        _remove_xla_marks(node.attr)
        for value in node.attr.values():
            for reference in [value.func, *value.list.func] if value.WhichOneof("value") else ():
                callee = function_named(reference.name, function.graph) if reference.name else None
                if callee is not None:
                    reference.name = _add_trial_definition(callee, definitions)
    return str(plain.signature.name)


def _remove_xla_marks(attributes: Any) -> None:
    for attribute in (MUST_COMPILE, "_xla_compile_id"):
        attributes.pop(attribute, None)


def _trial_argument(symbol: Any, value: Any, extent: int, variables: list[Any]) -> Any:
    """Return an argument for a trial: a value, zeros, or a new variable in the place of a variable.

    Raises TypeError for an argument that cannot be copied, such as a table or an iterator.
    """
    is_value = isinstance(value, ops.EagerTensor)
    if symbol.dtype != tf.resource:
        return value if is_value else _zeros(symbol.dtype, symbol.shape, extent)
    handle_data = value._handle_data if is_value else handle_data_util.get_resource_handle_data(symbol)
    if handle_data is None or not handle_data.is_set or len(handle_data.shape_and_type) != 1:
        raise TypeError(f"{symbol.name} is no variable")
    variable_type = handle_data.shape_and_type[0]
    dtype, shape = tf.as_dtype(variable_type.dtype), tf.TensorShape(variable_type.shape)
    with tf.device(value.device if is_value else None):
        # Writes of the trial go to copies of the variables.
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=context.anonymous_name())
        variables.append(handle)
        if not is_value:
            content = _zeros(dtype, shape, extent)
        elif tf.raw_ops.VarIsInitializedOp(resource=value):
            content = tf.raw_ops.ReadVariableOp(resource=value, dtype=dtype)
        else:
            return handle
        tf.raw_ops.AssignVariableOp(resource=handle, value=content)
    return handle


def _zeros(dtype: tf.DType, shape: tf.TensorShape, extent: int) -> Any:
    """Return zeros, with this extent for each unknown one.  Raises TypeError for a variant or no rank."""
    if shape.rank is None or dtype == tf.variant:
        raise TypeError(f"zeros of {dtype.name} with shape {shape}")
    extents = [extent if size is None else size for size in shape]
    return tf.fill(extents, "") if dtype == tf.string else tf.zeros(extents, dtype)

"""Functions of the runtime: definitions, graphs, callees, random ops, and trials without XLA."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import errors, function_def_to_graph, op_def_registry, ops
from tensorflow.python.ops import handle_data_util

from ._nodes import op_def


class RuntimeFunction:
    """A function that a graph calls: its definition, and a FuncGraph whose operations are its nodes.

    arguments: names of the arguments in the definition.
    names: by the name of an operation of the graph, its name in the definition.
    """

    def __init__(self, definition: Any, graph: Any) -> None:
        self.definition = definition
        self.graph = graph
        arguments = [arg.name for arg in definition.signature.input_arg]
        names = _node_names(graph, definition) or {}
        inputs = {tensor.op.name: name for tensor, name in zip(graph.inputs, arguments, strict=False)}
        self.arguments = arguments
        self.names: dict[str, str] = {**names, **inputs}

    @property
    def name(self) -> str:
        """The runtime's name of the function."""
        return str(self.definition.signature.name)


class _FunctionGraphs:
    """Graphs of functions; built from the definition where the traced graph is gone or has changed."""

    def __init__(self) -> None:
        self._rebuilt: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def graph_of(self, atomic: Any, definition: Any) -> Any:
        """Return the graph in which a function was traced, or a cached graph built from its definition."""
        traced_graph = atomic._cached_graph
        if traced_graph is not None and _node_names(traced_graph, definition) is not None:
            return traced_graph
        rebuilt_graph = self._rebuilt.get(atomic)
        if rebuilt_graph is None:
            rebuilt_graph = self._rebuilt[atomic] = atomic_function.to_func_graph(atomic)
        return rebuilt_graph


_graphs = _FunctionGraphs()


def function_of(atomic: Any) -> RuntimeFunction:
    """Return a function of the runtime, from TensorFlow's handle of it."""
    definition = atomic.definition
    return RuntimeFunction(definition, _graphs.graph_of(atomic, definition))


def function_named(name: str, graph: Any) -> RuntimeFunction | None:
    """Return the function that a node of a graph calls by this name; None where it is out of reach.

    Without TensorFlow's handle of the function, its graph is built anew at each call.
    """
    atomic = graph._functions.get(name)
    if atomic is not None and hasattr(atomic, "_cached_graph"):
        return function_of(atomic)
    runtime = context.context()
    if atomic is not None:
        definition = getattr(atomic, "definition", None)
    else:
        definition = runtime.get_function_def(name) if runtime.has_function(name) else None
    if definition is None:
        return None
    # The new graph must not become a child of the graph that the caller is building.
    with ops.Graph().as_default():
        return RuntimeFunction(definition, function_def_to_graph.function_def_to_graph(definition))


def _node_names(graph: Any, definition: Any) -> dict[str, str] | None:
    """Return the names in a definition by the names in its graph; None if the definition is of another graph.

    TensorFlow renames operations that are named like an argument or a result. Operations that were created
    after the definition come last in the graph.
    """
    input_ops = {tensor.op for tensor in graph.inputs}
    operations = [op for op in graph.get_operations() if op not in input_ops]
    if len(graph.inputs) < len(definition.signature.input_arg) or len(operations) < len(definition.node_def):
        return None
    names: dict[str, str] = {}
    for node, op in zip(definition.node_def, operations, strict=False):
        # TensorFlow appends "_1" and the like to a name that an argument or result has, too.
        if node.op != op.type or not node.name.startswith(op.name):
            return _identical_names(operations, definition)
        names[op.name] = node.name
    return names


def _identical_names(operations: Sequence[tf.Operation], definition: Any) -> dict[str, str] | None:
    """Return the names of a graph built from a definition, whose order may differ; None for others."""
    type_by_name = {op.name: op.type for op in operations}
    if any(type_by_name.get(node.name) != node.op for node in definition.node_def):
        return None
    return {node.name: node.name for node in definition.node_def}


def executed_nodes(definition: Any) -> set[str]:
    """Return the names of the nodes that run when a function is called."""
    nodes = {node.name: node for node in definition.node_def}
    pending_names = [text.partition(":")[0] for text in definition.ret.values()]
    pending_names += definition.control_ret.values()
    # Stateful nodes run even if no result needs them.
    pending_names += [node.name for node in definition.node_def
                if (op_definition := op_def(node.op)) is not None and op_definition.is_stateful]  # fmt: skip
    executed_names: set[str] = set()
    while pending_names:
        name = pending_names.pop()
        if name in executed_names or name not in nodes:  # arguments are not nodes
            continue
        executed_names.add(name)
        pending_names += [text.removeprefix("^").partition(":")[0] for text in nodes[name].input]
    return executed_names


def ops_with_generators(functions: Iterable[Any]) -> list[str]:
    """Return "name (type)" of each node of functions whose kernel holds a seeded generator."""
    return [
        f"{node.name} ({node.op})"
        for function in functions
        for node in function.node_def
        if _has_generator(node)
    ]


def with_callees(functions: Iterable[Any], find_definition: Any) -> list[Any]:
    """Return the functions and all that they call, each once, without those that `find_definition` lacks."""
    definitions = {function.signature.name: function for function in functions}
    pending_definitions = list(definitions.values())
    while pending_definitions:
        for name in _callee_names(pending_definitions.pop()):
            definition = None if name in definitions else find_definition(name)
            if definition is not None:
                definitions[name] = definition
                pending_definitions.append(definition)
    return list(definitions.values())


def _has_generator(node: Any) -> bool:
    """Return True for a random op with a seed, whose kernel holds the state of a generator."""
    definition = op_def_registry.get(node.op)
    # Stateless random ops get their state as an input.
    if definition is None or not definition.is_stateful or "seed2" not in node.attr:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)  # without both, no run repeats another


def _callee_names(function: Any) -> Iterator[str]:
    """Yield the names of the functions that a function's nodes call."""
    for node in function.node_def:
        for value in node.attr.values():
            if value.func.name:
                yield value.func.name
            yield from (callee.name for callee in value.list.func)


MUST_COMPILE = "_XlaMustCompile"
_EXTENTS = (8, 1, 2, 32)
"""Sizes for unknown extents of arguments, such as a batch size, which are tried in this order."""

RUNS_IN_XLA_ALONE = "it has jit_compile=True and fails without XLA, so that it runs uninstrumented"

_numbers = count()
# By graph: a trial runs the function once, and no second time while the function lives.
_trial_results: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def must_compile(holder: Any) -> bool:
    """Return True for a FunctionDef, or a node that calls a function, with jit_compile=True."""
    return MUST_COMPILE in holder.attr and bool(holder.attr[MUST_COMPILE].b)


def runs_without_xla(function: RuntimeFunction, read_argument: Callable[[int], Any]) -> bool:
    """Return True if TensorFlow can run a function without XLA, after a trial run on copies of variables.

    The result is cached by the function's graph.
    read_argument: returns the value of an argument, by position; zeros are used for a symbol.
    """
    # XLA has kernels that TensorFlow lacks, such as grouped convolutions in three dimensions on a CPU. A
    # table of these would never be complete, so each function is tried once, on copies of its variables.
    if function.graph not in _trial_results:
        values = [read_argument(i) for i in range(len(function.graph.inputs))]
        # Symbols with unknown dimensions may fail with one extent, and not with another.
        has_symbols = not all(isinstance(value, ops.EagerTensor) for value in values)
        extents = _EXTENTS if has_symbols else _EXTENTS[:1]
        _trial_results[function.graph] = any(_try_without_xla(function, values, extent) for extent in extents)
    return _trial_results[function.graph]


def _try_without_xla(function: RuntimeFunction, values: list[Any], extent: int) -> bool:
    """Run a copy of a function without XLA, and drop the results; return False if it fails.

    extent: size of the unknown dimensions of arguments without a value.
    """
    trial_definition_by_name: dict[str, Any] = {}
    trial_name = _define_trial(function, trial_definition_by_name)
    runtime = context.context()
    living_functions = []  # the runtime drops a function with its last AtomicFunction
    for definition in trial_definition_by_name.values():
        runtime.add_function_def(definition)
        name = definition.signature.name.encode()
        living_functions.append(atomic_function.AtomicFunction(name, runtime, None))
    new_variables: list[Any] = []  # `_trial_argument` appends to them
    try:
        arguments = [
            _trial_argument(symbol, value, extent, new_variables)
            for symbol, value in zip(function.graph.inputs, values, strict=True)
        ]
        # The runtime is called directly, so that no tape or scope sees the trial.
        output_count = len(function.definition.signature.output_arg)
        runtime.call_function(trial_name.encode(), arguments, output_count)
    # TypeError is raised for arguments that cannot be copied, such as tables and iterators.
    except (errors.OpError, ValueError, TypeError):
        return False
    finally:
        for handle in new_variables:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
    return True


def _define_trial(function: RuntimeFunction, trial_definition_by_name: dict[str, Any]) -> str:
    """Add copies of a function and those that it calls, without attributes for XLA; return its copy's name.

    trial_definition_by_name: the copies by the name of the original, to which those missing are added.
    """
    if function.name in trial_definition_by_name:
        return str(trial_definition_by_name[function.name].signature.name)
    trial_definition = function_pb2.FunctionDef()
    trial_definition_by_name[function.name] = trial_definition
    trial_definition.CopyFrom(function.definition)
    trial_definition.signature.name = f"{function.name}_amanda_trial_{next(_numbers)}"
    _remove_xla_marks(trial_definition.attr)
    for node in trial_definition.node_def:
        _remove_xla_marks(node.attr)
        for value in node.attr.values():
            references = [value.func, *value.list.func] if value.WhichOneof("value") else []
            for reference in references:
                callee = function_named(reference.name, function.graph) if reference.name else None
                if callee is not None:
                    reference.name = _define_trial(callee, trial_definition_by_name)
    return str(trial_definition.signature.name)


def _remove_xla_marks(attributes: Any) -> None:
    """Remove the attributes by which XLA compiles a function or a call."""
    for attribute in (MUST_COMPILE, "_xla_compile_id"):
        attributes.pop(attribute, None)


def _trial_argument(symbol: Any, value: Any, extent: int, new_variables: list[Any]) -> Any:
    """Return an argument for a trial: a value, zeros, or a new variable in the place of a variable.

    value: of the argument, or anything else than an eager tensor if it has none; zeros are used then, also in
    the new variable, whose handle is appended to `new_variables`.
    Raises TypeError for an argument that cannot be copied, such as a table or an iterator.
    """
    has_value = isinstance(value, ops.EagerTensor)
    if symbol.dtype != tf.resource:
        return value if has_value else _zeros(symbol.dtype, symbol.shape, extent)
    handle_data = value._handle_data if has_value else handle_data_util.get_resource_handle_data(symbol)
    if handle_data is None or not handle_data.is_set or len(handle_data.shape_and_type) != 1:
        raise TypeError(f"{symbol.name} is no variable")
    variable_type = handle_data.shape_and_type[0]
    dtype, shape = tf.as_dtype(variable_type.dtype), tf.TensorShape(variable_type.shape)
    with tf.device(value.device if has_value else None):
        # Writes of the trial go to copies of the variables.
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=context.anonymous_name())
        new_variables.append(handle)
        if not has_value:
            initial_value = _zeros(dtype, shape, extent)
        elif tf.raw_ops.VarIsInitializedOp(resource=value):
            initial_value = tf.raw_ops.ReadVariableOp(resource=value, dtype=dtype)
        else:
            return handle
        tf.raw_ops.AssignVariableOp(resource=handle, value=initial_value)
    return handle


def _zeros(dtype: tf.DType, shape: tf.TensorShape, extent: int) -> Any:
    """Return zeros, or empty strings, with `extent` for each unknown extent.

    Raises TypeError for a variant or an unknown rank.
    """
    if shape.rank is None or dtype == tf.variant:
        raise TypeError(f"zeros of {dtype.name} with shape {shape}")
    extents = [extent if size is None else size for size in shape]
    return tf.fill(extents, "") if dtype == tf.string else tf.zeros(extents, dtype)

"""Functions of the runtime: their definitions, graphs, callees, and random ops."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import function_def_to_graph, op_def_registry, ops

from ._syntax import op_def


class GraphFunction:
    """A function that a graph calls: its definition, and a FuncGraph whose operations are its nodes.

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
        """Return the graph in which a function was traced, or a graph built from its definition."""
        traced = atomic._cached_graph
        if traced is not None and _node_names(traced, definition) is not None:
            return traced
        rebuilt = self._rebuilt.get(atomic)
        if rebuilt is None:
            rebuilt = self._rebuilt[atomic] = atomic_function.to_func_graph(atomic)
        return rebuilt


_graphs = _FunctionGraphs()


def function_of(atomic: Any) -> GraphFunction:
    """Return a function of the runtime, from TensorFlow's handle of it."""
    definition = atomic.definition
    return GraphFunction(definition, _graphs.graph_of(atomic, definition))


def function_named(name: str, graph: Any) -> GraphFunction | None:
    """Return the function that a node of a graph calls by this name; None where it is out of reach."""
    handle = graph._functions.get(name)
    if handle is not None and hasattr(handle, "_cached_graph"):
        return function_of(handle)
    current = context.context()
    if handle is None and not current.has_function(name):
        return None
    definition = current.get_function_def(name) if handle is None else getattr(handle, "definition", None)
    if definition is None:
        return None
    # The new graph must not become a child of the graph that the caller is building.
    with ops.Graph().as_default():
        return GraphFunction(definition, function_def_to_graph.function_def_to_graph(definition))


def _node_names(graph: Any, definition: Any) -> dict[str, str] | None:
    """Return a definition's names of the operations of its graph; None if it is of another graph.

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
    types = {op.name: op.type for op in operations}
    if any(types.get(node.name) != node.op for node in definition.node_def):
        return None
    return {node.name: node.name for node in definition.node_def}


def executed_nodes(definition: Any) -> set[str]:
    """Return the names of the nodes that run when a function is called."""
    nodes = {node.name: node for node in definition.node_def}
    pending = [text.partition(":")[0] for text in definition.ret.values()]
    pending += definition.control_ret.values()
    # Stateful nodes run even if no result needs them.
    pending += [node.name for node in definition.node_def
                if (op_definition := op_def(node.op)) is not None and op_definition.is_stateful]  # fmt: skip
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in reached or name not in nodes:
            continue
        reached.add(name)
        pending += [text.removeprefix("^").partition(":")[0] for text in nodes[name].input]
    return reached


def ops_with_generators(functions: Iterable[Any]) -> list[str]:
    """Return the names of nodes of functions whose kernels hold a seeded generator."""
    return [
        f"{node.name} ({node.op})"
        for function in functions
        for node in function.node_def
        if _has_generator(node)
    ]


def with_callees(functions: Iterable[Any], find: Any) -> list[Any]:
    """Return the functions and all that they call, each once; `find` returns a definition by name."""
    definitions = {function.signature.name: function for function in functions}
    pending = list(definitions.values())
    while pending:
        for name in _callee_names(pending.pop()):
            definition = None if name in definitions else find(name)
            if definition is not None:
                definitions[name] = definition
                pending.append(definition)
    return list(definitions.values())


def _has_generator(node: Any) -> bool:
    definition = op_def_registry.get(node.op)
    # Stateless random ops get their state as an input.
    if definition is None or not definition.is_stateful or "seed2" not in node.attr:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)  # without both, no run repeats another


def _callee_names(function: Any) -> Iterator[str]:
    for node in function.node_def:
        for value in node.attr.values():
            if value.func.name:
                yield value.func.name
            yield from (callee.name for callee in value.list.func)

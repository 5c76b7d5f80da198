"""Functions of the runtime: their definitions, and the graphs they were traced in."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import function_def_to_graph, ops

from ._syntax import op_def


class Function:
    """A function that a graph calls: its definition, and a FuncGraph whose operations are its nodes.

    names: of the graph's operations, the names that the definition has for them.
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
        """The runtime's name of it."""
        return str(self.definition.signature.name)


class _Graphs:
    """Graphs made of definitions of functions whose own graph is gone or has changed."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of(self, atomic: Any, definition: Any) -> Any:
        """The graph that a function was traced in, where TensorFlow still has it, else one made anew."""
        own = atomic._cached_graph
        if own is not None and _node_names(own, definition) is not None:
            return own
        made = self._made.get(atomic)
        if made is None:
            made = self._made[atomic] = atomic_function.to_func_graph(atomic)
        return made


_graphs = _Graphs()


def function_of(atomic: Any) -> Function:
    """A function of the runtime by TensorFlow's handle of it."""
    definition = atomic.definition
    return Function(definition, _graphs.of(atomic, definition))


def function_named(name: str, graph: Any) -> Function | None:
    """A function by the name that a node of a graph calls it by; None where it is out of reach."""
    found = graph._functions.get(name)
    if found is not None and hasattr(found, "_cached_graph"):
        return function_of(found)
    current = context.context()
    if found is None and not current.has_function(name):
        return None
    definition = current.get_function_def(name) if found is None else getattr(found, "definition", None)
    if definition is None:
        return None
    with ops.Graph().as_default():
        return Function(definition, function_def_to_graph.function_def_to_graph(definition))


def _node_names(graph: Any, definition: Any) -> dict[str, str] | None:
    """Return what a definition calls the operations of its graph; None where it is not of this graph.

    Operations that are named like an argument or a result got another name, and those that were made
    since then come last.
    """
    held = {tensor.op for tensor in graph.inputs}
    operations = [op for op in graph.get_operations() if op not in held]
    if len(graph.inputs) < len(definition.signature.input_arg) or len(operations) < len(definition.node_def):
        return None
    names: dict[str, str] = {}
    for node, op in zip(definition.node_def, operations, strict=False):
        if node.op != op.type or not node.name.startswith(op.name):
            return _same_names(operations, definition)
        names[op.name] = node.name
    return names


def _same_names(operations: Sequence[tf.Operation], definition: Any) -> dict[str, str] | None:
    """The names where they are the same in a graph that was made of a definition, whose order is another."""
    types = {op.name: op.type for op in operations}
    if any(types.get(node.name) != node.op for node in definition.node_def):
        return None
    return {node.name: node.name for node in definition.node_def}


def executed(definition: Any) -> set[str]:
    """Names of the nodes that run when a function is called."""
    nodes = {node.name: node for node in definition.node_def}
    waiting = [text.partition(":")[0] for text in definition.ret.values()]
    waiting += definition.control_ret.values()
    waiting += [node.name for node in definition.node_def
                if (known := op_def(node.op)) is not None and known.is_stateful]  # fmt: skip
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached or name not in nodes:
            continue
        reached.add(name)
        waiting += [text.removeprefix("^").partition(":")[0] for text in nodes[name].input]
    return reached

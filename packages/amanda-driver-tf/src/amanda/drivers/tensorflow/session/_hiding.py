"""Hiding of nodes of a C graph from the Python graph.

The patched attributes are on the graph object: they die with the graph, and no other graph has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import ops

PREFIX = "amanda_hidden_"


def is_hidden(name: str) -> bool:
    """Return True if a node of this name is hidden."""
    return name.startswith(PREFIX)


def hide_nodes(graph: Any, functions: Iterable[str]) -> None:
    """Hide the nodes of a graph that have hidden names, and these functions, which hidden nodes call."""
    hidden_functions = getattr(graph._as_graph_def, "functions", None)
    if hidden_functions is not None:
        hidden_functions.update(functions)
        return
    hidden = set(functions)
    reference = weakref.ref(graph)
    as_graph_def = _with_interface(type(graph)._as_graph_def, _VisibleGraphInterface(reference, hidden))

    def _as_graph_def(*args: Any, **kwargs: Any) -> Any:
        return as_graph_def(reference(), *args, **kwargs)

    def new_operations() -> list[Any]:
        graph: Any = reference()
        operations = type(graph).new_operations(graph)
        return [operation for operation in operations if not is_hidden(_C_API.TF_OperationName(operation))]

    _as_graph_def.functions = hidden  # type: ignore[attr-defined]
    graph._as_graph_def = _as_graph_def
    graph.new_operations = new_operations


_C_API: Any = ops.pywrap_tf_session


class _VisibleGraphInterface:
    """TensorFlow's C API, but for two functions, which return a graph without its hidden parts."""

    def __init__(self, graph: weakref.ref[Any], functions: Collection[str]) -> None:
        self._graph = graph
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(_C_API, name)

    def TF_GetBuffer(self, buffer: Any) -> bytes:
        """Return the visible part of a serialized graph."""
        graph_def = graph_pb2.GraphDef()
        graph_def.ParseFromString(_C_API.TF_GetBuffer(buffer))
        return self._visible_part(graph_def).SerializeToString()  # type: ignore[no-any-return]

    def TF_GraphToGraphDefPybind(self, c_graph: Any) -> Any:
        """Return the visible part of a graph as a GraphDef."""
        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(_C_API.TF_GraphToGraphDefPybind(c_graph))
        return self._visible_part(graph_def)

    def _visible_part(self, graph_def: Any) -> Any:
        """Return a GraphDef without hidden nodes and functions."""
        graph: Any = self._graph()
        hidden = {name for name in self._functions if name not in graph._functions}
        visible = graph_pb2.GraphDef()
        visible.node.extend(node for node in graph_def.node if not is_hidden(node.name))
        visible.versions.CopyFrom(graph_def.versions)
        functions = graph_def.library.function
        visible.library.function.extend(
            definition for definition in functions if definition.signature.name not in hidden
        )
        visible.library.gradient.extend(graph_def.library.gradient)
        return visible


def _with_interface(method: Any, interface: _VisibleGraphInterface) -> Any:
    """Return a method of Graph that calls another C API."""
    # The method calls the C API as a global of TensorFlow's module, so the copy gets globals of its own.
    names = {**method.__globals__, "pywrap_tf_session": interface}
    return FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)

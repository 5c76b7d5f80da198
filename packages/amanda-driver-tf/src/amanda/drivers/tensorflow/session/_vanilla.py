"""Keeping nodes of a graph's C side out of what its Python side shows.

The attributes that do so are the graph's own: they die with it, and no other graph has them.
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
    """Return True if a node of this name was put beside the user's."""
    return name.startswith(PREFIX)


def hide_nodes(graph: Any, functions: Iterable[str]) -> None:
    """Hide nodes of a graph, and these functions, which hidden nodes call, from those who list them."""
    known = getattr(graph._as_graph_def, "functions", None)
    if known is not None:
        known.update(functions)
        return
    hidden = set(functions)
    reference = weakref.ref(graph)
    as_graph_def = _reading(type(graph)._as_graph_def, _Shown(reference, hidden))

    def _as_graph_def(*args: Any, **kwargs: Any) -> Any:
        return as_graph_def(reference(), *args, **kwargs)

    def new_operations() -> list[Any]:
        graph: Any = reference()
        found = type(graph).new_operations(graph)
        return [one for one in found if not is_hidden(_SESSION.TF_OperationName(one))]

    _as_graph_def.functions = hidden  # type: ignore[attr-defined]
    graph._as_graph_def = _as_graph_def
    graph.new_operations = new_operations


_SESSION: Any = ops.pywrap_tf_session


class _Shown:
    """The C interface, through which a graph is read without its hidden parts."""

    def __init__(self, graph: weakref.ref[Any], functions: Collection[str]) -> None:
        self._graph = graph
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(_SESSION, name)

    def TF_GetBuffer(self, buffer: Any) -> bytes:
        """A graph's bytes."""
        whole = graph_pb2.GraphDef()
        whole.ParseFromString(_SESSION.TF_GetBuffer(buffer))
        return self._shown(whole).SerializeToString()  # type: ignore[no-any-return]

    def TF_GraphToGraphDefPybind(self, c_graph: Any) -> Any:
        """A graph as a message."""
        whole = graph_pb2.GraphDef()
        whole.CopyFrom(_SESSION.TF_GraphToGraphDefPybind(c_graph))
        return self._shown(whole)

    def _shown(self, graph_def: Any) -> Any:
        graph: Any = self._graph()
        hidden = {name for name in self._functions if name not in graph._functions}
        left = graph_pb2.GraphDef()
        left.node.extend(node for node in graph_def.node if not is_hidden(node.name))
        left.versions.CopyFrom(graph_def.versions)
        functions = graph_def.library.function
        left.library.function.extend(one for one in functions if one.signature.name not in hidden)
        left.library.gradient.extend(graph_def.library.gradient)
        return left


def _reading(method: Any, interface: _Shown) -> Any:
    """A method of Graph that reads the C graph through another interface."""
    names = {**method.__globals__, "pywrap_tf_session": interface}
    return FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)

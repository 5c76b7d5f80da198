"""Keeping nodes of a graph's C side out of what its Python side shows.

The attributes that do so are the graph's own: they die with it, and no other graph has them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

from amanda.backend import Attributes
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import ops

PREFIX = "amanda_hidden_"


def is_hidden(name: str) -> bool:
    """Whether a node of this name was put beside the user's."""
    return name.startswith(PREFIX)


def hide_nodes(graph: Any, functions: Iterable[str]) -> None:
    """Let a graph show no node that is hidden, nor these functions, which hidden nodes call."""
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


class _Readers:
    """While graphs live in which hidden nodes read the user's, those readers are left out.

    TensorFlow fails where an operation's reader has no Python object, so the methods that list readers
    are replaced as long as such a graph lives.
    """

    def __init__(self) -> None:
        self._attributes = Attributes()
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._count = 0
        self._known: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()

    def hide(self, graph: Any) -> None:
        """Leave hidden readers out for a graph."""
        if graph in self._alive:
            return
        if not self._count:
            self._attributes.set(ops.SymbolicTensor, "consumers", self._replaced_consumers())
            self._attributes.set(ops.Operation, "_control_outputs", self._replaced_control_outputs())
        self._alive.add(graph)
        self._count += 1
        weakref.finalize(graph, self._died)

    def _died(self) -> None:
        self._count -= 1
        if not self._count:
            self._attributes.restore()

    def _replaced_consumers(self) -> Any:
        original = ops.SymbolicTensor.consumers

        def consumers(tensor: Any) -> list[Any]:
            if tensor.graph not in self._alive:
                return original(tensor)  # type: ignore[no-any-return]
            names = self._readers(tensor.graph)[0].get((tensor.op.name, tensor.value_index), ())
            return [tensor.graph.get_operation_by_name(name) for name in names]

        return consumers

    def _replaced_control_outputs(self) -> Any:
        original = ops.Operation._control_outputs

        def control_outputs(op: Any) -> list[Any]:
            if op.graph not in self._alive:
                return original.fget(op)  # type: ignore[no-any-return]
            names = self._readers(op.graph)[1].get(op.name, ())
            return [op.graph.get_operation_by_name(name) for name in names]

        return property(control_outputs)

    def _readers(self, graph: Any) -> tuple[Any, Any]:
        """Who reads each tensor, and who waits for each operation."""
        version, *known = self._known.get(graph, (-1, None, None))
        if version != graph.version:
            known = [defaultdict(list), defaultdict(list)]
            for op in graph.get_operations():
                for tensor in op.inputs:
                    known[0][tensor.op.name, tensor.value_index].append(op.name)
                for waited in op.control_inputs:
                    known[1][waited.name].append(op.name)
            self._known[graph] = (graph.version, *known)
        return known[0], known[1]


hide_readers = _Readers().hide

"""Nodes added to the C graph of a session beside the user's nodes, and hidden from the Python graph.

Hidden nodes have no Python operations, and TensorFlow fails where a node or reader has none. So the graph,
and the tensors and operations that hidden nodes read, get patched attributes. These die with the graph; other
graphs, and TensorFlow's classes, stay as they are.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from types import FunctionType
from typing import Any, ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.client.session import BaseSession
from tensorflow.python.framework import c_api_util, ops

from ..graph import placeholder

_numbers = count(1)


class HiddenImport:
    """Nodes that were imported together.

    operations: the C operations by the names of the nodes, without the prefix.
    """

    def __init__(self, prefix: str, operations: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self.operations = operations

    def output(self, name: str, index: int) -> Any:
        """Return an output of a hidden node as the C API takes it."""
        output = c_api.TF_Output()
        output.oper = self.operations[name]
        output.index = index
        return output


class HiddenNodes:
    """The hidden nodes of a graph; equal nodes are added once."""

    _by_graph: ClassVar[weakref.WeakKeyDictionary[Any, HiddenNodes]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._imports: dict[bytes, HiddenImport] = {}

    @classmethod
    def of_graph(cls, graph: Any) -> HiddenNodes:
        """Return the hidden nodes of a graph."""
        if graph not in cls._by_graph:
            cls._by_graph[graph] = cls()
        return cls._by_graph[graph]

    def add(
        self, session: Any, nodes: Sequence[Any], functions: Sequence[Any], result_names: Collection[str]
    ) -> HiddenImport:
        """Import nodes that read each other and nodes of the session's graph.

        result_names: names of the nodes whose C operations are needed.
        Raises OpError where a session like this one refuses the nodes.
        """
        key = _digest(nodes, functions, result_names)
        # Nodes cannot be removed from a C graph, so each import is kept, and used again for equal nodes.
        if key not in self._imports:
            self._imports[key] = _import_nodes(session, nodes, functions, result_names)
        return self._imports[key]


def _digest(nodes: Iterable[Any], functions: Iterable[Any], result_names: Iterable[str]) -> bytes:
    """Return a digest of nodes, functions and result names."""
    content = blake2b(digest_size=16)
    for message in (*nodes, *functions):
        text = message.SerializeToString(deterministic=True)
        content.update(b"%d:" % len(text) + text)
    content.update("\n".join(sorted(result_names)).encode())
    return content.digest()


def _import_nodes(
    session: Any, nodes: Sequence[Any], functions: Sequence[Any], result_names: Collection[str]
) -> HiddenImport:
    """Import nodes into a session's C graph, hidden from Python.

    Raises OpError if TensorFlow refuses them in a scratch graph, which comes first.
    """
    graph = session.graph
    prefix = f"{PREFIX}{next(_numbers)}/"
    graph_def, tensors_read, ops_awaited = _hide_names(nodes, prefix)
    # The producer version decides the semantics of some ops.
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    graph_def.library.function.extend(functions)
    _try_import(session, graph_def)
    # Nodes are hidden before they exist, since other threads may look at the graph while they are imported.
    hide_nodes(graph, [definition.signature.name for definition in functions])
    hide_readers(graph, tensors_read, ops_awaited)
    # Other threads may add operations to the graph.
    with graph._mutation_lock(), graph._c_graph.get() as c_graph:
        scoped_options = c_api_util.ScopedTFImportGraphDefOptions()  # owns the options
        options = scoped_options.options
        for name, index in tensors_read:
            output = graph.get_operation_by_name(name).outputs[index]._as_tf_output()
            c_api.TF_ImportGraphDefOptionsAddInputMapping(options, name, index, output)
        for name in ops_awaited:
            c_op = graph.get_operation_by_name(name)._c_op
            c_api.TF_ImportGraphDefOptionsRemapControlDependency(options, name, c_op)
        for name in result_names:
            c_api.TF_ImportGraphDefOptionsAddReturnOperation(options, prefix + name)
        results = _import_graph_def(c_graph, graph_def, options)
        operations = c_api.TF_ImportGraphDefResultsReturnOperations(results.results)
    return HiddenImport(prefix, dict(zip(result_names, operations, strict=True)))


def _import_graph_def(c_graph: Any, graph_def: Any, options: Any) -> Any:
    """Import a GraphDef into a C graph; return TensorFlow's results, which own the memory."""
    # The nodes may be placed beside nodes of the C graph, which are not in the GraphDef.
    c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
    buffer = c_api.TF_NewBufferFromString(graph_def.SerializeToString())
    try:
        return c_api_util.ScopedTFImportGraphDefResults(
            c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options)
        )
    finally:
        c_api.TF_DeleteBuffer(buffer)


def _try_import(session: Any, graph_def: Any) -> None:
    """Import nodes into a scratch graph with a session, with placeholders for the user's nodes.

    Raises OpError where TensorFlow refuses the nodes.
    """
    # Nodes cannot be removed from a graph again, and a session that has refused a node runs no more.
    trial_graph_def = graph_pb2.GraphDef()
    session.graph._copy_functions_to_graph_def(trial_graph_def, 0)
    trial_graph_def.MergeFrom(graph_def)
    _read_placeholders(trial_graph_def, session.graph)
    scratch_graph = ops.Graph()
    with scratch_graph._c_graph.get() as c_graph:
        scoped_options = c_api_util.ScopedTFImportGraphDefOptions()  # owns the options
        _import_graph_def(c_graph, trial_graph_def, scoped_options.options)
    trial_session = BaseSession(graph=scratch_graph, config=session._config)
    try:
        trial_session._extend_graph()
    finally:
        trial_session.close()


def _read_placeholders(graph_def: Any, graph: Any) -> None:
    """Make nodes of a GraphDef read placeholders, which are added to it, instead of nodes of a graph."""
    names = {node.name for node in graph_def.node}
    placeholders: dict[str, Any] = {}
    for node in graph_def.node:
        for position, text in enumerate(node.input):
            name, _, index = text.removeprefix("^").partition(":")
            if name in names:
                continue
            placeholder_name = f"{name}/amanda_{index or 0}"
            node.input[position] = f"^{placeholder_name}" if text.startswith("^") else placeholder_name
            if placeholder_name not in placeholders:
                op = graph.get_operation_by_name(name)
                placeholders[placeholder_name] = _placeholder_for(placeholder_name, op, index)
    graph_def.node.extend(placeholders.values())


def _placeholder_for(name: str, op: Any, index: str) -> Any:
    """Return a node with an output like that of an operation: a reference, a value, or none.

    index: of the output, "" for the first or for an operation that is only waited for.
    """
    if not op.outputs:
        return node_def_pb2.NodeDef(name=name, op="NoOp")
    tensor = op.outputs[int(index or 0)]
    node = placeholder(name, tensor.dtype.base_dtype.as_datatype_enum, tensor.shape)
    # No placeholder has a reference as its output; the node of a variable has.
    node.op = "VariableV2" if tensor.dtype._is_ref_dtype else node.op
    return node


def _hide_names(nodes: Sequence[Any], prefix: str) -> tuple[Any, set[tuple[str, int]], set[str]]:
    """Return a GraphDef of nodes under hidden names; other nodes' tensors read, and operations waited for."""
    names = {node.name for node in nodes}
    tensors_read: set[tuple[str, int]] = set()
    ops_awaited: set[str] = set()
    graph_def = graph_pb2.GraphDef()
    for node in nodes:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name = prefix + node.name
        for position, text in enumerate(node.input):
            is_control = text.startswith("^")
            name, _, index = text.lstrip("^").partition(":")
            if name in names:
                copy.input[position] = f"{'^' if is_control else ''}{prefix}{text.lstrip('^')}"
            elif is_control:
                ops_awaited.add(name)
            else:
                tensors_read.add((name, int(index or 0)))
        _keep_colocation(copy, node, names, prefix)
        graph_def.node.append(copy)
    return graph_def, tensors_read, ops_awaited


def _keep_colocation(copy: Any, node: Any, names: Collection[str], prefix: str) -> None:
    """Place a copy with the copies of nodes that its original is placed with, and with its resource.

    A resource without a shared name gets the original's name as that, by which it is found.
    """
    if "_class" in node.attr:
        copied_classes = copy.attr["_class"].list.s
        for position, node_class in enumerate(node.attr["_class"].list.s):
            colocated_name = node_class.decode().removeprefix("loc:@")
            if node_class.startswith(b"loc:@") and colocated_name in names:
                copied_classes[position] = f"loc:@{prefix}{colocated_name}".encode()
    if "shared_name" in node.attr:
        if not node.attr["shared_name"].s:
            copy.attr["shared_name"].s = node.name.encode()
        # A resource is found by name on its own device, so the copy has to be placed there.
        copy.attr["_class"].list.s.append(f"loc:@{node.name}".encode())


PREFIX = "amanda_hidden_"


def is_hidden(name: str) -> bool:
    """Return True if a node of this name is hidden."""
    return name.startswith(PREFIX)


def hide_nodes(graph: Any, functions: Iterable[str]) -> None:
    """Hide the nodes of a graph that have hidden names, and these functions, which hidden nodes call.

    Later nodes are hidden, too.
    """
    # The first call replaces two methods of the graph, and leaves the names at one of them for later calls.
    hidden_names = getattr(graph._as_graph_def, "functions", None)
    if hidden_names is not None:
        hidden_names.update(functions)
        return
    hidden_names = set(functions)
    reference = weakref.ref(graph)
    # Attributes of the instance hide the methods of this graph alone. They hold the graph weakly, since a
    # cycle with a C graph in it would keep the graph until the garbage collector runs.
    as_graph_def = _with_interface(type(graph)._as_graph_def, _VisibleGraphInterface(reference, hidden_names))

    def _as_graph_def(*args: Any, **kwargs: Any) -> Any:
        return as_graph_def(reference(), *args, **kwargs)

    def new_operations() -> list[Any]:
        graph: Any = reference()
        operations = type(graph).new_operations(graph)
        return [operation for operation in operations if not is_hidden(_C_API.TF_OperationName(operation))]

    _as_graph_def.functions = hidden_names  # type: ignore[attr-defined]
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
        # A function that the user's graph has, too, stays visible.
        hidden_function_names = {name for name in self._functions if name not in graph._functions}
        visible_graph_def = graph_pb2.GraphDef()
        visible_graph_def.node.extend(node for node in graph_def.node if not is_hidden(node.name))
        visible_graph_def.versions.CopyFrom(graph_def.versions)
        functions = graph_def.library.function
        visible_graph_def.library.function.extend(
            definition for definition in functions if definition.signature.name not in hidden_function_names
        )
        visible_graph_def.library.gradient.extend(graph_def.library.gradient)
        return visible_graph_def


def _with_interface(method: Any, interface: _VisibleGraphInterface) -> Any:
    """Return a method of Graph that calls another C API."""
    # The method calls the C API as a global of TensorFlow's module, so the copy gets globals of its own.
    names = {**method.__globals__, "pywrap_tf_session": interface}
    return FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)


Readers = dict[Any, list[str]]


class _VisibleReaders:
    """The visible readers of each tensor and operation of a graph, updated when the graph grows."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, tuple[int, Readers]] = weakref.WeakKeyDictionary()

    def readers_of(self, graph: Any, source: Any) -> list[Any]:
        """Return the operations that read a tensor (name and index), or wait for an operation (name)."""
        version, reader_names = self._by_graph.get(graph, (-1, {}))
        # The version of a graph grows with each new operation.
        if version != graph.version:
            reader_names = defaultdict(list)
            for op in graph.get_operations():
                for tensor in op.inputs:
                    reader_names[tensor.op.name, tensor.value_index].append(op.name)
                for control_input in op.control_inputs:
                    reader_names[control_input.name].append(op.name)
            self._by_graph[graph] = graph.version, reader_names
        return [graph.get_operation_by_name(name) for name in reader_names.get(source, ())]


_visible_readers = _VisibleReaders()


class _OperationReadByHidden(ops.Operation):  # type: ignore[misc]
    """An operation that hidden nodes wait for, whose `_control_outputs` lists visible nodes."""

    @property
    def _control_outputs(self) -> list[Any]:
        return _visible_readers.readers_of(self.graph, self.name)


# Programs that look at the class of an operation find the names of TensorFlow's class.
_OperationReadByHidden.__name__ = ops.Operation.__name__
_OperationReadByHidden.__qualname__ = ops.Operation.__qualname__
_OperationReadByHidden.__module__ = ops.Operation.__module__


def hide_readers(graph: Any, tensors: Iterable[tuple[str, int]], operations: Iterable[str]) -> None:
    """Make these tensors and operations list their visible readers alone."""
    reference = weakref.ref(graph)
    for name, index in tensors:
        tensor = graph.get_operation_by_name(name).outputs[index]
        # The lambda must not hold the graph, on whose tensor it is set.
        tensor.consumers = lambda source=(name, index): _visible_readers.readers_of(reference(), source)
    for name in operations:
        graph.get_operation_by_name(name).__class__ = _OperationReadByHidden

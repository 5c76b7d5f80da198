"""Nodes put beside the user's into the C graph of a session, where no Python operation stands for them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.client.session import BaseSession
from tensorflow.python.framework import c_api_util, ops

from ..graph import placeholder
from ._readers import hide_readers
from ._vanilla import PREFIX, hide_nodes

_numbers = count(1)


class Hidden:
    """Nodes that were imported together, by the names that they stand for."""

    def __init__(self, prefix: str, operations: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self.operations = operations

    def output(self, name: str, index: int) -> Any:
        """The C API's name for an output of a hidden node."""
        output = c_api.TF_Output()
        output.oper = self.operations[name]
        output.index = index
        return output


class HiddenNodes:
    """Nodes that were put beside one graph's own; equal nodes are put there once."""

    _of: ClassVar[weakref.WeakKeyDictionary[Any, HiddenNodes]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._imports: dict[bytes, Hidden] = {}

    @classmethod
    def of(cls, graph: Any) -> HiddenNodes:
        """Return the hidden nodes of a graph."""
        if graph not in cls._of:
            cls._of[graph] = cls()
        return cls._of[graph]

    def put(
        self, session: Any, nodes: Sequence[Any], functions: Sequence[Any], wanted: Collection[str]
    ) -> Hidden:
        """Import nodes whose inputs are each other, or those of the session's graph.

        wanted: names of the nodes that will be asked for.  Raises OpError where such a session refuses them.
        """
        key = _digest(nodes, functions, wanted)
        if key not in self._imports:
            self._imports[key] = _imported(session, nodes, functions, wanted)
        return self._imports[key]


def _digest(nodes: Iterable[Any], functions: Iterable[Any], wanted: Iterable[str]) -> bytes:
    whole = blake2b(digest_size=16)
    for message in (*nodes, *functions):
        text = message.SerializeToString(deterministic=True)
        whole.update(b"%d:" % len(text) + text)
    whole.update("\n".join(sorted(wanted)).encode())
    return whole.digest()


def _imported(
    session: Any, nodes: Sequence[Any], functions: Sequence[Any], wanted: Collection[str]
) -> Hidden:
    """Read by hidden nodes, a node of the user's has readers that Python does not know: it shows its own."""
    graph = session.graph
    prefix = f"{PREFIX}{next(_numbers)}/"
    graph_def, outputs, controls = _renamed(nodes, prefix)
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    graph_def.library.function.extend(functions)
    _try(session, graph_def)
    hide_nodes(graph, [one.signature.name for one in functions])
    names = list(wanted)
    hide_readers(graph, outputs, controls)
    with graph._mutation_lock(), graph._c_graph.get() as c_graph:
        scoped = c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
        for name, index in outputs:
            output = graph.get_operation_by_name(name).outputs[index]._as_tf_output()
            c_api.TF_ImportGraphDefOptionsAddInputMapping(options, name, index, output)
        for name in controls:
            c_op = graph.get_operation_by_name(name)._c_op
            c_api.TF_ImportGraphDefOptionsRemapControlDependency(options, name, c_op)
        for name in names:
            c_api.TF_ImportGraphDefOptionsAddReturnOperation(options, prefix + name)
        buffer = c_api.TF_NewBufferFromString(graph_def.SerializeToString())
        try:
            results = c_api_util.ScopedTFImportGraphDefResults(
                c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options)
            )
        finally:
            c_api.TF_DeleteBuffer(buffer)
        operations = c_api.TF_ImportGraphDefResultsReturnOperations(results.results)
    return Hidden(prefix, dict(zip(names, operations, strict=True)))


def _try(session: Any, graph_def: Any) -> None:
    """Give nodes to a session and graph of their own first, with stand-ins for the user's nodes.

    Nodes cannot be taken out of a graph again, and a session that refuses some runs no more.
    """
    own = {node.name for node in graph_def.node}
    whole = graph_pb2.GraphDef()
    session.graph._copy_functions_to_graph_def(whole, 0)
    whole.MergeFrom(graph_def)
    made: set[str] = set()
    for node in whole.node:
        for position, read in enumerate(node.input):
            name, _, index = read.removeprefix("^").partition(":")
            if name in own:
                continue
            stand_in = f"{name}/amanda_{index or 0}"
            node.input[position] = f"^{stand_in}" if read.startswith("^") else stand_in
            if stand_in not in made:
                made.add(stand_in)
                whole.node.append(_stand_in(stand_in, session.graph.get_operation_by_name(name), index))
    scratch = ops.Graph()
    with scratch._c_graph.get() as c_graph:
        scoped = c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        c_api.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
        buffer = c_api.TF_NewBufferFromString(whole.SerializeToString())
        try:
            c_api_util.ScopedTFImportGraphDefResults(
                c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options)
            )
        finally:
            c_api.TF_DeleteBuffer(buffer)
    trial = BaseSession(graph=scratch, config=session._config)
    try:
        trial._extend_graph()
    finally:
        trial.close()


def _stand_in(name: str, op: Any, index: str) -> Any:
    """A node that gives what an operation does: a reference, a value, or nothing."""
    if not op.outputs:
        return node_def_pb2.NodeDef(name=name, op="NoOp")
    tensor = op.outputs[int(index or 0)]
    made = placeholder(name, tensor.dtype.base_dtype.as_datatype_enum, tensor.shape)
    made.op = "VariableV2" if tensor.dtype._is_ref_dtype else made.op
    return made


def _renamed(nodes: Sequence[Any], prefix: str) -> tuple[Any, set[tuple[str, int]], set[str]]:
    """Nodes under hidden names; the outputs of other nodes that they read, and those that they wait for."""
    own = {node.name for node in nodes}
    outputs: set[tuple[str, int]] = set()
    controls: set[str] = set()
    graph_def = graph_pb2.GraphDef()
    for node in nodes:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name = prefix + node.name
        for position, read in enumerate(node.input):
            control = read.startswith("^")
            name, _, index = read.lstrip("^").partition(":")
            if name in own:
                copy.input[position] = f"{'^' if control else ''}{prefix}{read.lstrip('^')}"
            elif control:
                controls.add(name)
            else:
                outputs.add((name, int(index or 0)))
        _keep_places(copy, node, own, prefix)
        graph_def.node.append(copy)
    return graph_def, outputs, controls


def _keep_places(copy: Any, node: Any, own: Collection[str], prefix: str) -> None:
    """Make a copy be placed with what its original is placed with, and find the resource that it names."""
    if "_class" in node.attr:
        classes = copy.attr["_class"].list.s
        for position, place in enumerate(node.attr["_class"].list.s):
            other = place.decode().removeprefix("loc:@")
            if place.startswith(b"loc:@") and other in own:
                classes[position] = f"loc:@{prefix}{other}".encode()
    if "shared_name" in node.attr:
        if not node.attr["shared_name"].s:
            copy.attr["shared_name"].s = node.name.encode()
        copy.attr["_class"].list.s.append(f"loc:@{node.name}".encode())

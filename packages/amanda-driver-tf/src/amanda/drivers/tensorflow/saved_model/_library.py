"""The functions of a SavedModel by the names that they have in the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.framework import function_def_to_graph

from ..graph import Function


class Library:
    """Functions that call each other; each has a graph, in which none of the others is inlined."""

    def __init__(self, graph: graph_pb2.GraphDef) -> None:
        self._definitions: Mapping[str, Any] = {one.signature.name: one for one in graph.library.function}
        self._graphs: dict[str, Any] = {}
        self._holder = tf.Graph()
        with self._holder.as_default():
            empty = graph_pb2.GraphDef(versions=graph.versions, library=graph.library)
            tf.graph_util.import_graph_def(empty, name="")

    def find(self, name: str) -> Function | None:
        """A function with a definition to be edited; None where there is none of that name."""
        if name not in self._definitions:
            return None
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(self._definitions[name])
        if name not in self._graphs:
            with self._holder.as_default():
                self._graphs[name] = function_def_to_graph.function_def_to_graph(definition)
        return Function(definition, self._graphs[name])

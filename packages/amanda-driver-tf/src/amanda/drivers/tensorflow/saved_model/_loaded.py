"""A loaded SavedModel: its functions, and the variables, tables and constants that these are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.checkpoint import checkpoint_options
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.saved_model import load, load_options

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


class Bound:
    """The objects of a SavedModel, loaded, so that variables have values."""

    def __init__(self, saved_model: Any, path: Path) -> None:
        own = type(saved_model)()
        own.CopyFrom(saved_model)  # it is renamed, and more, by what loads it
        with ops.init_scope():
            self._loader = load.Loader(
                own.meta_graphs[0].object_graph_def, own, str(path), checkpoint_options.CheckpointOptions(),
                load_options.LoadOptions(), None,
            )  # fmt: skip

    def to(self, function: str) -> list[Any]:
        """Return what a function is given behind its own arguments: handles, or other tensors."""
        return list(self._loader._concrete_functions[function].captured_inputs)

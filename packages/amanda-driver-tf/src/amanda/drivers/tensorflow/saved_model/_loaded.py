"""A loaded SavedModel: its functions, and the variables, tables and constants that they capture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.checkpoint import checkpoint_options
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.saved_model import load, load_options

from ..graph import GraphFunction


class FunctionLibrary:
    """The functions of a SavedModel by name, each with a graph in which no other function is inlined."""

    def __init__(self, graph: graph_pb2.GraphDef) -> None:
        self._definitions: Mapping[str, Any] = {
            definition.signature.name: definition for definition in graph.library.function
        }
        self._graphs: dict[str, Any] = {}
        self._holder = tf.Graph()
        with self._holder.as_default():
            empty = graph_pb2.GraphDef(versions=graph.versions, library=graph.library)
            # The import registers the functions with this graph, in which calls of them are looked up.
            tf.graph_util.import_graph_def(empty, name="")

    def find(self, name: str) -> GraphFunction | None:
        """Return a function with a copy of its definition, which may be edited; None for an unknown name."""
        if name not in self._definitions:
            return None
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(self._definitions[name])
        if name not in self._graphs:
            with self._holder.as_default():
                self._graphs[name] = function_def_to_graph.function_def_to_graph(definition)
        return GraphFunction(definition, self._graphs[name])


class LoadedObjects:
    """The objects of a SavedModel, loaded so that variables have values."""

    def __init__(self, saved_model: Any, path: Path) -> None:
        private_copy = type(saved_model)()
        private_copy.CopyFrom(saved_model)  # the loader renames functions in it
        # Loaded variables must not become part of a graph that the caller is building.
        with ops.init_scope():
            self._loader = load.Loader(
                private_copy.meta_graphs[0].object_graph_def, private_copy, str(path),
                checkpoint_options.CheckpointOptions(), load_options.LoadOptions(), None,
            )  # fmt: skip

    def captured_inputs(self, function: str) -> list[Any]:
        """Return the tensors that a function captures, such as handles of variables."""
        return list(self._loader._concrete_functions[function].captured_inputs)

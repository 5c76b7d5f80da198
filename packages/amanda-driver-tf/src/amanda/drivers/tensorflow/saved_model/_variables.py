"""Captures of a SavedModel's functions: variables with their values, tables, constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorflow.python.checkpoint import checkpoint_options
from tensorflow.python.framework import ops
from tensorflow.python.saved_model import load, load_options


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

"""ONNX files, with routines written into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, external_data_helper

from amanda.backend import Artefact, Inlining, Namespace, digest
from amanda.errors import ArtefactError

from ._instrument import namespace
from ._model import Model, read_proto
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors
from ._types import types_by_onnxruntime
from ._written import written

ABOUT = "amanda"
LARGE = 1 << 30
"""Bytes of values above which they are written beside a model: protocol buffers end at 2 GB."""


class OnnxFile(Artefact):
    """An ONNX model, with its external data.

    Opsets, metadata, names of inputs and outputs, and what is not touched are kept. What a routine makes of
    initializers alone is stored instead of them.
    """

    api = 1
    kind = "ONNX model"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._source = read_proto(path)
            if not self._source.ir_version or not self._source.graph.output:
                raise ValueError("it has no graph")
            self._model = Model(self._source, str(path.parent))
        except OSError as error:
            reason = error.strerror or error
            raise ArtefactError(f"{error.filename or path} cannot be read: {reason}") from error
        except Exception as error:  # of protocol buffers, whose classes have changed, and of ONNX
            reason = str(error).partition("\n")[0]
            raise ArtefactError(f"{path} is no whole ONNX model: {reason}") from error
        self._is_external = any(map(external_data_helper.uses_external_data, self._source.graph.initializer))
        self._model.infer_types(types_by_onnxruntime)
        self._made: ModelProto | None = None

    def instrument(self, inlining: Inlining) -> None:
        """Rewrite the graph, with its bodies of control flow and local functions."""
        graph = self._model.proto.graph
        identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in graph.node))
        tags = Namespace(f"{namespace()}/static")
        rewriting = ModelRewriting(
            analysis=inlining.analysis(GraphTensors()), namespace=tags, written=True, model=self._model,
            identity=identity,
        )  # fmt: skip
        try:
            rewriting.run()
        finally:
            rewriting.analysis.finish()
        inlining.take_over(rewriting)
        self._made = None if rewriting.refused else written(self._source, rewriting)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the model; its data beside it, in one file, where they were beside it or are large."""
        assert self._made is not None
        _note(self._made, about)
        external_data_helper.load_external_data_for_model(self._made, str(self._path.parent))
        size = sum(len(one.raw_data) for one in self._made.graph.initializer)
        if not self._is_external and size < LARGE:
            onnx.save_model(self._made, path)
            return
        onnx.save_model(
            self._made, path, save_as_external_data=True, all_tensors_to_one_file=True,
            location=f"{path.name}.data",
        )  # fmt: skip


def _note(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Say in the metadata what was done, after what is said there already."""
    told = {one.key: one.value for one in model.metadata_props}
    notes = [*json.loads(told.get(ABOUT, "[]")), about]
    onnx.helper.set_model_props(model, {**told, ABOUT: json.dumps(notes)})

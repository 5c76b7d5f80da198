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
from ._model import Model, read_proto, types_by_onnxruntime
from ._model_writing import write_model
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors

ABOUT = "amanda"
LARGE = 1 << 30
"""Bytes of values above which a model is written with external data: protocol buffers end at 2 GB."""


class OnnxFile(Artefact):
    """An ONNX model, with its external data.

    Opsets, metadata, names of inputs and outputs, and nodes without routines are kept. The result of a
    routine on initializers is stored instead of these.
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
        except Exception as error:  # the errors of protocol buffers differ between their versions
            reason = str(error).partition("\n")[0]
            raise ArtefactError(f"{path} is no whole ONNX model: {reason}") from error
        self._is_external = any(map(external_data_helper.uses_external_data, self._source.graph.initializer))
        self._model.infer_types(types_by_onnxruntime)
        self._instrumented: ModelProto | None = None

    def instrument(self, inlining: Inlining) -> None:
        """Rewrite the graph, its bodies of control flow and its local functions."""
        graph = self._model.proto.graph
        # The ids of ops must not depend on the file's path, nor on its weights.
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
        self._instrumented = None if rewriting.refused else write_model(self._source, rewriting)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the model, with external data in one file if the source has external data, or large data."""
        assert self._instrumented is not None
        _append_description(self._instrumented, about)
        # The values are copied into the new file or its data file: a copy must not refer to the source's
        # folder.
        external_data_helper.load_external_data_for_model(self._instrumented, str(self._path.parent))
        size = sum(len(tensor.raw_data) for tensor in self._instrumented.graph.initializer)
        if not self._is_external and size < LARGE:
            onnx.save_model(self._instrumented, path)
            return
        onnx.save_model(
            self._instrumented, path, save_as_external_data=True, all_tensors_to_one_file=True,
            location=f"{path.name}.data",
        )  # fmt: skip


def _append_description(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Append a description of the tools to those in the model's metadata."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    descriptions = [*json.loads(properties.get(ABOUT, "[]")), about]
    onnx.helper.set_model_props(model, {**properties, ABOUT: json.dumps(descriptions)})

"""ONNX models in files, of strangers too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import file_beside
from amanda.tools.libraries import numpy as np
from amanda.tools.results import parsing

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_LARGE = 1 << 30
"""Bytes of initializers above which they are written beside a model: protocol buffers end at 2 GB."""


def read_onnx(
    path: str | PathLike[str], kind: type[AmandaError] = AmandaError, data: bool = True
) -> ModelProto:
    """Read an ONNX model; its external data from regular files in its folder alone.

    kind: of the error.  data: whether external data are read, which else are checked alone.
    Raises FileError where the file cannot be read, and an error of the kind for another file, and where onnx
    is not installed.
    """
    try:
        import onnx
        from onnx import external_data_helper
    except ImportError as error:
        raise kind(f"{path} is read with onnx: pip install amanda-driver-onnxruntime") from error
    path = Path(path)
    with parsing(path, "ONNX model", kind):
        proto = onnx.load(path, load_external_data=False)
        for tensor in _tensors(proto):
            if external_data_helper.uses_external_data(tensor):
                place = external_data_helper.ExternalDataInfo(tensor).location
                file_beside(path, place, f"the data of {tensor.name}")
        if data:
            external_data_helper.load_external_data_for_model(proto, str(path.parent))
    return proto


def _tensors(message: Any) -> Iterator[TensorProto]:
    """Yield the tensors in a model: initializers, attributes, those of bodies, functions and sparse ones."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                if part.DESCRIPTOR.name == "TensorProto":
                    yield part
                else:
                    yield from _tensors(part)


def save_onnx(model: ModelProto, path: Path, folder: Path | None = None, is_external: bool = False) -> int:
    """Write a model, with its data in one file beside it where these are large.

    folder: that of external data, which are read first.  is_external: data lie beside the model in any case.
    Returns the bytes of the initializers.
    """
    import onnx
    from onnx import external_data_helper

    if folder is not None:
        external_data_helper.load_external_data_for_model(model, str(folder))
    size = sum(map(_size_in_bytes, model.graph.initializer))
    beside = is_external or size >= _LARGE
    onnx.save_model(
        model, path, save_as_external_data=beside, location=f"{path.name}.data" if beside else None
    )
    return size


def _size_in_bytes(tensor: TensorProto) -> int:
    from onnx import helper

    return int(prod(tensor.dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)


def add_note(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Say in the metadata of a model what was done, after what is said there already."""
    from onnx import helper

    metadata = {entry.key: entry.value for entry in model.metadata_props}
    notes = [*json.loads(metadata.get("amanda", "[]")), about]
    helper.set_model_props(model, {**metadata, "amanda": json.dumps(notes)})


def opset_of(model: ModelProto) -> int:
    """Return the version of ONNX' own operators; 0 where the model names none."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0)


def inlined(model: ModelProto) -> ModelProto:
    """Return a model whose local functions are nodes of the graph; the model itself where it has none."""
    from onnx import inliner

    return inliner.inline_local_functions(model) if model.functions else model

"""ONNX models in files, of strangers too."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import file_beside
from amanda.tools.results import parsing

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


def read_onnx(
    path: str | PathLike[str], kind: type[AmandaError] = AmandaError, data: bool = True
) -> ModelProto:
    """Read an ONNX model; its external data from regular files in its folder alone.

    kind: of the error.  data: whether external data are read, which else are checked alone.
    Raises FileError where the file cannot be read, and an error of the kind for another file.
    """
    import onnx
    from onnx import external_data_helper

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

"""Arrays in files: safetensors or npz, with element types that numpy alone does not have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from amanda.errors import AmandaError
from amanda.files import replacing, write_file
from amanda.tools.kit import Tensors
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import safetensors
from amanda.tools.results import check_file, parsing, read_npz

if TYPE_CHECKING:
    from numpy.typing import NDArray

Format = Literal["safetensors", "npz"]
Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

_SAFE = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)
"""Element types that safetensors has; others are kept as bytes, and the index has their names."""


def write_arrays(path: Path, arrays: Arrays, form: Format) -> None:
    """Write arrays into one file, which is there whole or not at all. Raises FileError."""
    is_safe = form == "safetensors"
    kept = {
        key: array if (array.dtype.name in _SAFE if is_safe else array.dtype.isbuiltin == 1)
        else np.frombuffer(array.tobytes(), np.uint8)
        for key, array in arrays.items()
    }  # fmt: skip
    if is_safe:
        write_file(path, safetensors.numpy.save(kept))
        return
    with replacing(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **kept)


def read_arrays(path: Path) -> Arrays:
    """The arrays of a file; of types that the file's form does not have, the bytes.

    Raises AmandaError for a file that cannot be read.
    """
    with parsing(path, "file of tensors"):
        if path.suffix == ".npz":
            return read_npz(path)
        check_file(path)
        opened = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {key: np.frombuffer(one["data"], np.uint8) for key, one in opened}


def shaped(array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of a file as what it was.

    Raises AmandaError where the array does not have the numbers of this type and shape.
    """
    kind = Tensors.numpy_type(dtype)
    if kind.hasobject or min(shape, default=0) < 0 or prod(shape) * kind.itemsize != array.nbytes:
        raise AmandaError(f"{array.nbytes} bytes are no tensor of {dtype} and shape {list(shape)}")
    if array.dtype != kind:
        array = np.frombuffer(array.tobytes(), kind)
    return array.reshape(shape)

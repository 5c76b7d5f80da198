"""Files of scales and zero points, which other programs can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from amanda.files import write_file
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.results import check_file, check_schema, parsing, read_text, to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME, _VERSION = "quantize.scales", 1

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"


def write_scales(path: str | Path, arrays: Arrays, about: Mapping[str, Any]) -> Path:
    """Write arrays by name, and further values that describe them, as .json or .safetensors.

    Raises QuantizeError for another suffix, and FileError; then the file is as it was.
    """
    path = Path(path)
    description = {"schema": f"amanda.{_NAME}", "version": _VERSION, **about}
    if path.suffix == ".json":
        array_values = {
            name: {"dtype": str(array.dtype), "values": array.tolist()} for name, array in arrays.items()
        }
        return write_file(path, to_json({**description, "arrays": array_values}, indent=1) + "\n")
    if path.suffix == ".safetensors":
        from safetensors.numpy import save

        plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
        return write_file(path, save(plain, {"amanda": to_json(description)}))
    raise QuantizeError(f"{path} has another suffix than .json and .safetensors")


def read_scales(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays in a file of `write_scales`, and the values that were written with them.

    Raises QuantizeError for a file of another kind, or of a newer version, and FileError without one.
    """
    path = Path(path)
    with parsing(path, "file of scales", QuantizeError):
        if path.suffix == ".safetensors":
            check_file(path)
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["amanda"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            about = json.loads(read_text(path))
            arrays = {name: np.array(array["values"], _dtype(array["dtype"]))
                      for name, array in about.pop("arrays").items()}  # fmt: skip
        check_schema(about, _NAME, _VERSION)
        for name in ("options", "grids"):
            if not isinstance(about.get(name, {}), Mapping):
                raise ValueError(f"its {name} are {about[name]!r}")
    return arrays, about


def _dtype(name: str) -> str:
    if name not in ("float32", "int32"):
        raise ValueError(f"arrays of {name}")
    return name

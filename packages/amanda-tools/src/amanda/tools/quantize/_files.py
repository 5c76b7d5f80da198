"""Files of scales and zero points, which other programs can read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from amanda.tools._libraries import numpy as np
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.results import TooLargeError, check_file, check_schema, in_words, read_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME, _VERSION = "quantize.scales", 1

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"


def write_scales(path: str | Path, arrays: Arrays, about: Mapping[str, Any]) -> Path:
    """Write arrays by name, and further values that describe them, as .json or .safetensors.

    Raises QuantizeError for another suffix; then no file is written.
    """
    path = Path(path)
    told = {"schema": f"amanda.{_NAME}", "version": _VERSION, **about}
    if path.suffix == ".json":
        kept = {name: {"dtype": str(one.dtype), "values": one.tolist()} for name, one in arrays.items()}
        path.write_text(json.dumps({**told, "arrays": kept}, indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        plain = {name: np.ascontiguousarray(one).reshape(one.shape) for name, one in arrays.items()}
        save_file(plain, path, {"amanda": json.dumps(told)})
    else:
        raise QuantizeError(f"{path} has another suffix than .json and .safetensors")
    return path


def read_scales(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays in a file of `write_scales`, and the values that were written with them.

    Raises QuantizeError for a file of another kind, or of a newer version.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            check_file(path)
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["amanda"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            about = json.loads(read_text(path))
            arrays = {name: np.array(one["values"], _dtype(one["dtype"]))
                      for name, one in about.pop("arrays").items()}  # fmt: skip
        check_schema(about, _NAME, _VERSION)
    except (OSError, TooLargeError):
        raise
    except Exception as error:
        raise QuantizeError(f"{path} is no file of scales that can be read: {in_words(error)}") from error
    return arrays, about


def checked_target(out: str | os.PathLike[str] | None, suffix: str, what: str, force: bool) -> Path:
    """Return the path to write a converted model to.  Raises QuantizeError where it cannot be written."""
    if out is None or Path(out).suffix != suffix:
        raise QuantizeError(f"out is {out!r}; give the path of {what} ({suffix}) to write")
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():
        why = "a folder is there" if target.is_dir() else f"there is no folder {target.parent}"
        raise QuantizeError(f"{target} cannot be written: {why}")
    if target.exists() and not force:
        raise QuantizeError(f"{target} is there already; force=True replaces it")
    return target


def _dtype(name: str) -> str:
    if name not in ("float32", "int32"):
        raise ValueError(f"arrays of {name}")
    return name

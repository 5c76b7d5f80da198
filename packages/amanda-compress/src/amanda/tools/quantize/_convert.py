"""Convert simulated integers to real ones: in a module, a checkpoint, or an ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.options import checked, renamed
from amanda.tools.quantize._grid import QuantizeError

if TYPE_CHECKING:
    from amanda.tools.quantize.weights._convert import ConvertResult


@renamed(since="amanda-compress 0.2", gone="0.4", out="path")
@checked(error=QuantizeError)
def convert(
    model: Any, tool: Any, path: str | os.PathLike[str] | None = None, force: bool = False
) -> ConvertResult:
    """Convert simulated integers to real ones; outputs equal the simulation within kernels' rounding.

    model: a torch.nn.Module that a NearestTool, GPTQTool or AWQTool has quantised.  Without `path` its linear
        layers get tensors of torchao in place; with `path` the module stays unchanged, and a checkpoint of
        compressed-tensors for vLLM and transformers is written into that folder.
        Or the path of an ONNX file, with a QuantizeTool that was calibrated in a session of the file: a copy
        with integer weights, QuantizeLinear and DequantizeLinear nodes is written to `path`.
    path: of the new file or folder; the former name `out` is deprecated.  force: replace an existing file.

    The result has a row for each converted tensor.  A module that is converted in place is for inference.
    Raises QuantizeError for another model or tool, a missing package, scales of another model, and a `path`
    that cannot be written; an error leaves existing files unchanged.
    """
    if isinstance(model, (str, os.PathLike)):
        from amanda.tools.quantize._onnx_file import convert_file

        return convert_file(Path(model), tool, path, force)
    if path is None:
        from amanda.tools.quantize.weights._convert import convert_module

        return convert_module(model, tool)
    if Path(path).suffix == ".onnx":
        raise QuantizeError(
            f"path is {str(path)!r}, which is for ONNX files; a {type(model).__name__} was given: give the "
            "path of a folder, or none to convert it in place"
        )
    from amanda.tools.quantize.weights._convert import convert_checkpoint

    return convert_checkpoint(model, tool, Path(path), force)

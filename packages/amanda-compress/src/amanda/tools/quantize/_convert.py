"""Integers in the place of simulated ones: in a module's memory, a checkpoint, or an ONNX file."""

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
    """Make the integers that a tool simulates real; outputs are the simulation's within kernels' rounding.

    model: a torch.nn.Module, whose linear layers get tensors of torchao in place, by a NearestTool, GPTQTool
        or AWQTool that has met the module; with a `path` the module stays, and its integers are written into
        a folder, a checkpoint that vLLM and transformers read by compressed-tensors.  Or the path of an ONNX
        file, of which a copy is written to `path` with integer weights and QuantizeLinear and
        DequantizeLinear nodes, by a QuantizeTool with the scales of a session of the file.
    path: of the new file or folder; its former name `out` is deprecated.  force: replace what is there.

    The result has a row for each converted tensor.  A module that was converted in place is for inference.
    Raises QuantizeError for another model or tool, a package that is not installed, and scales of another
    model, and where `path` cannot be written; then what is there stays.
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
    from amanda.tools.quantize.weights._compressed import convert_checkpoint

    return convert_checkpoint(model, tool, Path(path), force)

"""Integers in the place of simulated ones: in a module's memory, or in an ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.options import checked
from amanda.tools.quantize._grid import QuantizeError

if TYPE_CHECKING:
    from amanda.tools.quantize.weights._convert import ConvertResult


@checked(error=QuantizeError)
def convert(
    model: Any, tool: Any, out: str | os.PathLike[str] | None = None, force: bool = False
) -> ConvertResult:
    """Make the integers that a tool simulates real; outputs are the simulation's within kernels' rounding.

    model: a torch.nn.Module, whose linear layers get tensors of torchao in place, by a NearestTool, GPTQTool
        or AWQTool that has met the module; or the path of an ONNX file, of which a copy is written to `out`
        with integer weights and QuantizeLinear and DequantizeLinear nodes, by a QuantizeTool with the scales
        of a session of the file.
    out: path of the new file.  force: replace a file that is there.

    The result has a row for each converted tensor.  The module is for inference.
    Raises QuantizeError for another model or tool, a package that is not installed, and scales of another
    model, and where `out` cannot be written; then what is there stays.
    """
    if isinstance(model, (str, os.PathLike)):
        from amanda.tools.quantize._onnx_file import convert_file

        return convert_file(Path(model), tool, out, force)
    if out is not None:
        raise QuantizeError(f"out is {out!r}, which is for ONNX files; a {type(model).__name__} was given")
    from amanda.tools.quantize.weights._convert import convert_module

    return convert_module(model, tool)

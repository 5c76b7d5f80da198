"""Conversion of an ONNX file to one that computes with integers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import FileError
from amanda.files import check_file_to_write, replacing_all
from amanda.tools.libraries import numpy as np
from amanda.tools.onnx_graph import add_note, inlined, opset_of, read_onnx, save_onnx
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._qdq import Key, QdqWriter, QuantizedInput, key_of
from amanda.tools.quantize._tool import QuantizeTool
from amanda.tools.quantize.weights._convert import ConvertResult

if TYPE_CHECKING:
    from onnx import ModelProto

_NARROW = (
    "ONNX Runtime's kernel for products with weights of 4 bits rounds their inputs to 8 bits; a session with "
    'the entry session.qdq_matmulnbits_accuracy_level "1" leaves them as they are.'
)


class InputsTool(amanda.Tool):
    """Notes the quantised inputs of each node of a file, by their positions; writes nothing."""

    def __init__(self, quantize: QuantizeTool) -> None:
        super().__init__()
        self._quantize = quantize
        self.nodes: dict[Key, dict[int, QuantizedInput]] = {}
        self.depends_on(quantize)
        self.add_inst_for_op(self._note)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Analyse a file; called by `amanda.instrument`."""
        analyse(self)

    def _note(self, context: amanda.OpContext) -> None:
        place = self._quantize.quantized_op(context)
        if place is None:
            return
        found = {}
        for (position, item), quantizer in place.quantizers.items():
            scale = quantizer.scale()
            if item is not None or scale is None:
                raise QuantizeError(
                    f"{quantizer.name} of {place.name} is a list, which has no nodes of its own; "
                    "leave its type out of `type`"
                )
            value = np.asarray(context.get_value(position)) if quantizer.is_weight else None
            dtype = str(context["dtype"](context.get_inputs()[position]))
            found[position] = QuantizedInput(quantizer.name, scale, dtype, value)
        key = key_of(context.get_op().node)
        if found and _told(self.nodes.setdefault(key, found)) != _told(found):
            raise QuantizeError(
                f"two nodes have the name of {place.name}, its inputs and its outputs, and other scales; "
                "give the nodes of the file names"
            )


def _told(found: Mapping[int, QuantizedInput]) -> Any:
    return {i: (one.scale.scale.tolist(), one.scale.zero_point.tolist()) for i, one in found.items()}


def convert_file(
    source: Path, tool: Any, out: str | os.PathLike[str] | None, force: bool = False
) -> ConvertResult:
    """Write a copy of an ONNX file that computes with integers where `tool` simulates them."""
    target = _checked(source, tool, out, force)
    model = _readied(read_onnx(source, QuantizeError), tool.options)
    with tempfile.TemporaryDirectory(prefix="amanda") as folder:
        plain = Path(folder, source.name)
        save_onnx(model, plain)
        found = InputsTool(tool)
        done = amanda.instrument(plain, found, out=Path(folder, "parts"))
    if waiting := tool.waiting_state():
        raise QuantizeError(f"no op of {source} has the scales of {', '.join(waiting[:4])}: of another model")
    if not found.nodes:
        raise QuantizeError(f"none of the {done.analysed} ops of {source} is quantised: {tool.options.types}")
    writer = QdqWriter(model, found.nodes, tool.options)
    writer.write()
    about = {"amanda-tools": version("amanda-tools"), "tools": ["quantize"], "model": source.name}
    add_note(model, about)
    with replacing_all(target, force) as path:
        save_onnx(model, path)
    left = dict(tool.result.left) | {one.what: one.reason for one in done.left}
    result = ConvertResult(target, writer.rows, _size(source), _size(target), left)
    if writer.has_narrow_products:
        result.remarks = [_NARROW]
    return result


def _checked(source: Path, tool: Any, out: Any, force: bool) -> Path:
    """Return the path to write to.  Raises QuantizeError for what cannot be read or written."""
    if source.suffix != ".onnx":
        raise QuantizeError(f"{source} is no ONNX file (.onnx); export the model to one")
    if not isinstance(tool, QuantizeTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for {source}; give a QuantizeTool that has the scales of a "
            "session of the file"
        )
    if out is None or Path(out).suffix != ".onnx" or Path(out).resolve() == source.resolve():
        raise QuantizeError(f"out is {out!r}; give the path of another ONNX file (.onnx) to write")
    target = Path(out)
    try:
        check_file_to_write(target)
    except FileError as error:
        raise QuantizeError(str(error)) from error
    if target.exists() and not force:
        raise QuantizeError(f"{target} is there already; force=True replaces it")
    return target


def _readied(model: ModelProto, options: Options) -> ModelProto:
    """Return a model without local functions, of a version of ONNX that has the types of the grids."""
    from onnx import version_converter

    wanted, found = _opset(options), opset_of(model)
    model = inlined(model)
    if found >= wanted:
        return model
    try:
        return version_converter.convert_version(model, wanted)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise QuantizeError(
            f"the model is of ONNX opset {found}, the nodes need opset {wanted}, and ONNX cannot convert it: "
            f"{reason}; export it with opset {wanted}"
        ) from error


def _opset(options: Options) -> int:
    """Return the first version of ONNX whose nodes have all grids of the options."""
    if options.group_size is not None:
        return 21
    given = (options.weight_bits, options.activation_bits)
    bits = [one for each in given for one in (each.values() if isinstance(each, Mapping) else [each])]
    numbers = [one for one in bits if isinstance(one, int)]
    if any(one <= 4 or one > 8 for one in numbers):
        return 21
    return 13 if len(numbers) == len([one for one in bits if one is not None]) else 19


def _size(path: Path) -> int:
    """Return the bytes of a model and of its data."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    data = {
        entry.value for one in model.graph.initializer for entry in one.external_data
        if entry.key == "location"
    }  # fmt: skip
    return sum(one.stat().st_size for one in (path, *(path.parent / name for name in data)))

"""Conversion of an ONNX file to integer weights with QuantizeLinear and DequantizeLinear nodes."""

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
from amanda.tools.onnx_graph import (
    add_note,
    inlined,
    opset_of,
    read_onnx,
    save_onnx,
)
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.quantize._qdq import NodeKey, QdqWriter, QuantizedInput, node_key
from amanda.tools.quantize._tool import QuantizeOptions, QuantizeTool
from amanda.tools.quantize.weights._convert import ConvertResult

if TYPE_CHECKING:
    from onnx import ModelProto


_NARROW = (
    "ONNX Runtime's kernel for products with weights of 4 bits rounds their inputs to 8 bits; a session with "
    'the entry session.qdq_matmulnbits_accuracy_level "1" leaves them as they are.'
)


class InputsTool(amanda.Tool):
    """Record the quantised inputs of each node of a file, by their positions; change nothing."""

    def __init__(self, quantize: QuantizeTool) -> None:
        super().__init__()
        self._quantize_tool = quantize
        self.nodes: dict[NodeKey, dict[int, QuantizedInput]] = {}
        # The quantizers of an op are there when this tool's routine looks at it.
        self.depends_on(quantize)
        self.add_inst_for_op(self._record_inputs)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Analyse a file, without writing any part; called by `amanda.instrument`."""
        analyse(self)

    def _record_inputs(self, context: amanda.OpContext) -> None:
        """Record the scale of each quantised input of a node, and the values of weights; else nothing.

        Raises QuantizeError for a list of tensors and for an input without a scale, and if another node with
        the same name, inputs and outputs has other scales.
        """
        op = self._quantize_tool.quantized_op(context)
        if op is None:
            return
        inputs = {}
        for (position, list_index), quantizer in op.quantizers.items():
            scale = quantizer.scale()
            if list_index is not None or scale is None:
                raise QuantizeError(
                    f"{quantizer.name} of {op.name} is a list, which has no nodes of its own; "
                    "leave its type out of `type`"
                )
            value = np.asarray(context.get_value(position)) if quantizer.is_weight else None
            dtype = str(context["dtype"](context.get_inputs()[position]))
            inputs[position] = QuantizedInput(quantizer.name, scale, dtype, value)
        key = node_key(context.get_op().node)
        # Nodes are found again by their names, inputs and outputs, which need not be unique in a file.
        if inputs and _scale_values(self.nodes.setdefault(key, inputs)) != _scale_values(inputs):
            raise QuantizeError(
                f"two nodes have the name of {op.name}, its inputs and its outputs, and other scales; "
                "give the nodes of the file names"
            )


def _scale_values(inputs: Mapping[int, QuantizedInput]) -> Any:
    """Return scales and zero points of inputs as lists, which compare by value."""
    return {
        i: (quantized_input.scale.scale.tolist(), quantized_input.scale.zero_point.tolist())
        for i, quantized_input in inputs.items()
    }


def convert_file(
    source: Path, tool: Any, out: str | os.PathLike[str] | None, force: bool = False
) -> ConvertResult:
    """Write a copy of an ONNX file that computes with the integers that `tool` simulates.

    Raises QuantizeError for invalid paths or tools, scales that no op has, and if no op is quantised.
    """
    target = _check_paths(source, tool, out, force)
    model = _upgrade_opset(read_onnx(source, QuantizeError), tool.options)
    with tempfile.TemporaryDirectory(prefix="amanda") as folder:
        # Nodes are matched by name, so the upgraded model is analysed, and not the source.
        upgraded_path = Path(folder, source.name)
        save_onnx(model, upgraded_path)
        inputs_tool = InputsTool(tool)
        instrumented = amanda.instrument(upgraded_path, inputs_tool, out=Path(folder, "parts"))
    waiting = tool.waiting_state()
    if waiting:
        raise QuantizeError(f"no op of {source} has the scales of {', '.join(waiting[:4])}: of another model")
    if not inputs_tool.nodes:
        raise QuantizeError(
            f"none of the {instrumented.analysed} ops of {source} is quantised: {tool.options.types}"
        )
    writer = QdqWriter(model, inputs_tool.nodes, tool.options)
    writer.write()
    about = {"amanda-tools": version("amanda-tools"), "tools": ["quantize"], "model": source.name}
    add_note(model, about)
    with replacing_all(target, force) as path:
        save_onnx(model, path)
    skipped = dict(tool.result.left) | {op.what: op.reason for op in instrumented.left}
    result = ConvertResult(target, writer.rows, _file_bytes(source), _file_bytes(target), skipped)
    if writer.has_narrow_products:
        result.remarks = [_NARROW]
    return result


def _check_paths(source: Path, tool: Any, out: Any, force: bool) -> Path:
    """Return the path to write to.  Raises QuantizeError for an invalid source, tool or target."""
    if source.suffix != ".onnx":
        raise QuantizeError(f"{source} is no ONNX file (.onnx); export the model to one")
    if not isinstance(tool, QuantizeTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for {source}; give a QuantizeTool that has the scales of a "
            "session of the file"
        )
    if out is None or Path(out).suffix != ".onnx" or Path(out).resolve() == source.resolve():
        raise QuantizeError(f"out is {out!r}; give the path of another ONNX file (.onnx) to write")
    # All that can be refused is refused before the model is read, which takes minutes for a large one.
    target = Path(out)
    try:
        check_file_to_write(target)
    except FileError as error:
        raise QuantizeError(str(error)) from error
    if target.exists() and not force:
        raise QuantizeError(f"{target} is there already; force=True replaces it")
    return target


def _upgrade_opset(model: ModelProto, options: QuantizeOptions) -> ModelProto:
    """Return a model without local functions, of a version of ONNX that has the types of the grids.

    Raises QuantizeError if ONNX cannot convert it.
    """
    from onnx import version_converter

    required, opset = _required_opset(options), opset_of(model)
    # A node in a function stands for all calls of the function, which may have different scales.
    model = inlined(model)
    if opset >= required:
        return model
    try:
        return version_converter.convert_version(model, required)
    # Of any kind: the converter is C++ and raises RuntimeError for what it does not know.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise QuantizeError(
            f"the model is of ONNX opset {opset}, the nodes need opset {required}, and ONNX cannot convert "
            f"it: {reason}; export it with opset {required}"
        ) from error


def _required_opset(options: QuantizeOptions) -> int:
    """Return the first version of ONNX whose nodes have all grids of the options."""
    all_bits: list[Any] = []
    for bits in (options.weight_bits, options.activation_bits):
        all_bits += bits.values() if isinstance(bits, Mapping) else [bits]
    # Blocks of DequantizeLinear, and INT4 and INT16, came with opset 21, float8 with 19, axes with 13.
    is_integer_of_21 = any(isinstance(bits, int) and (bits <= 4 or bits > 8) for bits in all_bits)
    if options.group_size is not None or is_integer_of_21:
        return 21
    return 19 if any(isinstance(bits, str) for bits in all_bits) else 13


def _file_bytes(path: Path) -> int:
    """Return the bytes of a model file and of the files with its external data."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    data_files = {
        path.parent / entry.value for tensor in model.graph.initializer for entry in tensor.external_data
        if entry.key == "location"
    }  # fmt: skip
    return sum(file.stat().st_size for file in (path, *data_files))

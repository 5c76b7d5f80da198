"""Content of a file of TensorFlow Lite: the ops and tensors that are integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake import Scale
from amanda.tools.quantize._tflite_graph import Marked, lite_zero_point


class LiteFile:
    """Content of a file of TensorFlow Lite."""

    def __init__(self, content: bytes) -> None:
        from tensorflow.lite.python import schema_py_generated as schema

        self._schema = schema
        self._model = schema.ModelT.InitFromPackedBuf(content, 0)
        self._tensors = [one for graph in self._model.subgraphs for one in graph.tensors]
        self._integers = [one for one in self._tensors if one.type == schema.TensorType.INT8]

    def rows(self, one: Marked) -> Iterator[tuple[Any, ...]]:
        """Yield the row of a tensor that is integers in the file."""
        told = one.layer, f"{one.tensor}, int8", 8
        if one.before is None:
            if any(map(partial(_has_scale, one.scale), self._integers)):
                yield *told, None, None, None
        elif any(one.node in _names(tensor) for tensor in self._integers):
            count = one.scale.scale.size
            yield *told, one.before // 4 // count, one.before, one.before // 4 + 4 * count

    def left(self, marks: Sequence[Marked]) -> dict[str, str]:
        """Return reasons why ops compute in floating point, by the op and its module or output."""
        modules = {one.node: one.layer for one in marks if one.node}
        names = {code: name for name, code in vars(self._schema.BuiltinOperator).items()}
        found = {}
        kinds = [names[max(one.builtinCode, one.deprecatedBuiltinCode)] for one in self._model.operatorCodes]
        for graph in self._model.subgraphs:
            ops = [(kinds[one.opcodeIndex], one) for one in graph.operators]
            makers = {output: kind for kind, one in ops for output in one.outputs}
            for kind, one in ops:
                output = graph.tensors[one.outputs[0]]
                if kind in _MOVES or output.type != self._schema.TensorType.FLOAT32:
                    continue
                readers = {other for other, each in ops if one.outputs[0] in each.inputs}
                why = _NO_KERNEL if readers == {"QUANTIZE"} else _NO_OUTPUT
                if {makers[i] for i in one.inputs if i in makers} != {"DEQUANTIZE"}:
                    why = _NO_INPUT
                read = [name for i in one.inputs for name in _names(graph.tensors[i]) if name in modules]
                found[f"{kind} of {modules[read[0]] if read else _names(output)[0]}"] = why
        return found


_MOVES = {"DEQUANTIZE", "RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS"}
_NO_OUTPUT = "no op that reads its output is quantised, so that the output has no scale"
_NO_INPUT = "its inputs have no scales"
_NO_KERNEL = "the converter finds no kernel of integers for it"


def _names(tensor: Any) -> list[str]:
    """Return the names that the converter joined for a tensor."""
    return list(tensor.name.decode().split(";"))


def _has_scale(scale: Scale, tensor: Any) -> bool:
    found = tensor.quantization
    if found is None or found.scale is None or len(found.scale) != 1:
        return False
    return bool(
        np.isclose(found.scale[0], scale.scale, 1e-6) and found.zeroPoint[0] == lite_zero_point(scale)
    )

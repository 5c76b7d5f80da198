"""Conversion of a Keras model to a file of TensorFlow Lite that computes with integers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import amanda
from amanda.files import write_file
from amanda.tools.kit import check
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._files import checked_target
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._tflite_file import LiteFile
from amanda.tools.quantize._tflite_graph import KERNELS, FakeQuantGraph, QuantizedNode
from amanda.tools.quantize._tool import QuantizeTool
from amanda.tools.quantize.weights._convert import ConvertResult


class NodesTool(amanda.Tool):
    """Notes the quantised nodes of a function that runs, by their names, with the values of weights."""

    def __init__(self, quantize: QuantizeTool) -> None:
        super().__init__()
        self._quantize = quantize
        self.nodes: dict[str, QuantizedNode] = {}
        self.depends_on(quantize)
        self.add_inst_for_op(self._note)

    def _note(self, context: amanda.OpContext) -> None:
        place = self._quantize.quantized_op(context)
        if place is None:
            return
        node = self.nodes[context.get_op().name] = QuantizedNode(place, {})
        for (position, _), quantizer in place.quantizers.items():
            if quantizer.is_weight:
                context.insert_before_op(partial(self._hold, node, position), inputs=[position])
            elif quantizer.scale() is None:
                raise QuantizeError(
                    f"{quantizer.name} of {place.name} has no scale: calibrate the tool with batches that "
                    "execute this op"
                )

    @staticmethod
    def _hold(node: QuantizedNode, position: int, value: Any) -> None:
        node.weights[position] = np.array(value)


def convert_keras(
    model: Any, tool: Any, out: str | os.PathLike[str] | None, force: bool = False
) -> ConvertResult:
    """Write a file of TensorFlow Lite whose kernels compute with integers where `tool` simulates them."""
    target = checked_target(out, ".tflite", "a file of TensorFlow Lite", force)
    if not isinstance(tool, QuantizeTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for a {type(model).__name__} of Keras; give a QuantizeTool "
            "that was calibrated with the model"
        )
    if type(model).__module__.startswith("keras.") and (runs_on := _backend()) != "tensorflow":
        raise QuantizeError(
            f"Keras runs on {runs_on}; a file of TensorFlow Lite is made of a model on tensorflow"
        )
    _check_options(tool.options)
    check("quantize.tflite", "tensorflow")
    nodes, function = _traced(model, tool)
    if waiting := tool.waiting_state():
        told = ", ".join(waiting[:4])
        raise QuantizeError(f"no op of {model.name} has the scales of {told}: of another model")
    if not nodes:
        raise QuantizeError(f"no op of {model.name} is quantised: {tool.options.types}")
    graph = FakeQuantGraph(function)
    for name, node in nodes.items():
        graph.quantise(name, node)
    made = _converted(graph.function())
    before = len(_converted(function, quantise=False))
    write_file(target, made)
    file = LiteFile(made)
    rows = [row for one in graph.made for row in file.rows(one)]
    return ConvertResult(target, rows, before, len(made), dict(tool.result.left) | file.left(graph.made))


def _backend() -> str:
    import keras

    return str(keras.backend.backend())


def _check_options(options: Options) -> None:
    """Raise QuantizeError for what no kernel of TensorFlow Lite computes with."""
    if options.method not in ("static", "qat"):
        raise QuantizeError(f'method {options.method!r} has no fixed scales; convert with "static" or "qat"')
    for name, what in (("weight_bits", "weights"), ("activation_bits", "activations")):
        given = getattr(options, name)
        for bits in given.values() if isinstance(given, Mapping) else [given]:
            if bits != 8:
                raise QuantizeError(f"{name} is {given!r}; {KERNELS} {what} of 8 bits")
    if options.group_size is not None:
        raise QuantizeError(
            f"group_size is {options.group_size}; {KERNELS} a scale for each output or for a tensor: let it "
            "be None"
        )
    if not options.symmetric_weights:
        raise QuantizeError(
            f"symmetric_weights is False; {KERNELS} weights without a zero point: let it be True"
        )


def _traced(model: Any, tool: QuantizeTool) -> tuple[dict[str, QuantizedNode], Any]:
    """Return the quantised nodes of a model's inference by name, and its function without variables."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise QuantizeError(
            f"a {type(model).__name__} has no symbolic inputs; give a keras.Sequential with an Input, or a "
            "keras.Model of inputs and outputs"
        )
    specs = [tf.TensorSpec(one.shape, one.dtype, name=one.name) for one in inputs]

    def infer(*given: Any) -> Any:
        return model(given[0] if len(given) == 1 else list(given), training=False)

    function = tf.function(infer, autograph=False, input_signature=specs)
    found, frozen = NodesTool(tool), tool.is_frozen
    tool.freeze()
    try:
        with amanda.apply(found):
            function(*(tf.zeros([size or 1 for size in one.shape], one.dtype) for one in specs))
    finally:
        tool.is_frozen = frozen
    return found.nodes, convert_variables_to_constants_v2(function.get_concrete_function())


def _converted(function: Any, quantise: bool = True) -> bytes:
    """Return the file that TensorFlow's converter makes of a function."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], tf.Module())
    if quantise:  # where nodes of fake quantisation give scales, the converter takes no others
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bytes(converter.convert())
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise QuantizeError(f"TensorFlow's converter cannot make a file of the model: {reason}") from error

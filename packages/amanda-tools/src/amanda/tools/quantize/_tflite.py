"""Conversion of a Keras model to a file of TensorFlow Lite that computes with integers."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import amanda
from amanda.tools._libraries import numpy as np
from amanda.tools.kit._requirements import check
from amanda.tools.quantize._fake import Scale
from amanda.tools.quantize._files import checked_target
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._op import QuantizedOp
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._tool import QuantizeTool
from amanda.tools.quantize.weights._convert import ConvertResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KERNELS = "TensorFlow Lite's kernels of integers read"


class QuantizedNode(NamedTuple):
    """A node of a function, its quantizers, and by position its weights on their grids."""

    place: QuantizedOp
    weights: dict[int, NDArray[Any]]


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
    _check_options(tool.options)
    check("quantize.tflite", "tensorflow")
    nodes, function = _traced(model, tool)
    if waiting := tool.waiting_state():
        raise QuantizeError(f"no op of the model has the scales of {', '.join(waiting[:4])}: of another model")
    if not nodes:
        raise QuantizeError(f"no op of {model.name} is quantised: {tool.options.types}")
    graph = FakeQuantGraph(function)
    for name, node in nodes.items():
        graph.quantise(name, node)
    made = _converted(graph.function())
    before = len(_converted(function, quantise=False))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        whole = Path(folder, target.name)
        whole.write_bytes(made)
        whole.replace(target)
    file = LiteFile(made)
    rows = [row for one in graph.made for row in file.rows(one)]
    return ConvertResult(target, rows, before, len(made), dict(tool.result.left) | file.left(graph.made))


def _check_options(options: Options) -> None:
    """Raise QuantizeError for what no kernel of TensorFlow Lite computes with."""
    if options.method not in ("static", "qat"):
        raise QuantizeError(f'method {options.method!r} has no fixed scales; convert with "static" or "qat"')
    for name, what in (("weight_bits", "weights"), ("activation_bits", "activations")):
        given = getattr(options, name)
        for bits in given.values() if isinstance(given, Mapping) else [given]:
            if bits != 8:
                raise QuantizeError(f"{name} is {given!r}; {_KERNELS} {what} of 8 bits")
    if options.group_size is not None:
        raise QuantizeError(
            f"group_size is {options.group_size}; {_KERNELS} a scale for each output or for a tensor: let it "
            "be None"
        )
    if not options.symmetric_weights:
        raise QuantizeError(
            f"symmetric_weights is False; {_KERNELS} weights without a zero point: let it be True"
        )


def _traced(model: Any, tool: QuantizeTool) -> tuple[dict[str, QuantizedNode], Any]:
    """Return the quantised nodes of a model's inference by name, and its function without variables."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise QuantizeError(
            f"{model.name}, a {type(model).__name__}, has no symbolic inputs; give a keras.Sequential with an "
            "Input, or a keras.Model of inputs and outputs"
        )
    specs = [tf.TensorSpec(one.shape, one.dtype, name=one.name) for one in inputs]

    @tf.function(autograph=False, input_signature=specs)
    def function(*given: Any) -> Any:
        return model(given[0] if len(given) == 1 else list(given), training=False)

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


class Marked(NamedTuple):
    """A quantised tensor of an op.

    node: in the file, the name of a weight.  before: bytes of a weight.
    """

    place: QuantizedOp
    tensor: str
    scale: Scale
    node: str = ""
    before: int | None = None

    @property
    def layer(self) -> str:
        """Return the module of the op, or the source line."""
        place = next(self.place.rows())
        return place.module or place.source


class FakeQuantGraph:
    """A graph of constants and nodes into which fake quantisation is written, as the converter reads it.

    made: the tensors that were quantised.
    """

    def __init__(self, function: Any) -> None:
        self._inputs = [one.name for one in function.inputs]
        self._outputs = [one.name for one in function.outputs]
        self._definition, self._shapes = function.graph.as_graph_def(), function.graph.get_tensor_by_name
        self._nodes = {one.name: one for one in self._definition.node}
        self._known: dict[Any, str] = {}
        self.made: list[Marked] = []

    def quantise(self, name: str, found: QuantizedNode) -> None:
        """Put nodes of fake quantisation before a node."""
        node, place = self._nodes.get(name), found.place
        if node is None:
            raise QuantizeError(
                f"{place.name} is in a tf.function of its own, {name}, "
                "which the converter inlines under other names; leave the module out by amanda.tools.select"
            )
        scales = [(*key, one, one.scale()) for key, one in place.quantizers.items()]
        activations = [scale for *_, one, scale in scales if scale is not None and not one.is_weight]
        if node.op in (*_PRODUCTS, "Einsum") and len(activations) > 1 and any(map(_zero_point, activations)):
            raise QuantizeError(
                f"{place.name} multiplies two activations, of which one has a zero point; TensorFlow Lite's "
                "XNNPACK computes such products wrongly: let symmetric_activations be True"
            )
        for position, item, quantizer, scale in scales:
            assert scale is not None
            if node.attr["T"].type != _float32():
                raise QuantizeError(f"{place.name} is in another type than float32; {_KERNELS} float32")
            index = position + (item or 0)
            if quantizer.is_weight:
                self._write_weight(node, index, found.weights[position], place, scale)
            else:
                node.input[index] = self._activation(node.input[index], scale)
                self.made.append(Marked(place, quantizer.name, scale))

    def function(self) -> Any:
        """Return the graph as a function."""
        import tensorflow as tf

        made = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(self._definition, name=""), [])
        inputs, outputs = (
            [made.graph.as_graph_element(one) for one in names] for names in (self._inputs, self._outputs)
        )
        return made.prune(inputs, outputs)

    def _activation(self, value: str, scale: Scale) -> str:
        """Return the name of the value on its grid."""
        key = value, scale.scale.tobytes(), scale.zero_point.tobytes()
        if key not in self._known:
            self._known[key] = self._fake(f"{value.partition(':')[0]}/quantised/{len(self._known)}", value, scale)
        return self._known[key]

    def _write_weight(
        self, node: Any, index: int, value: NDArray[Any], place: QuantizedOp, scale: Scale
    ) -> None:
        """Let a node read a weight whose integers the converter can see."""
        axes, shape, name = scale.axes, value.shape, f"{node.name}/weight/quantised"
        self.made.append(Marked(place, "weight", scale, name, value.nbytes))
        if node.op in _PRODUCTS and axes and index == 1 and value.ndim == 2:
            of_input, of_weight = _PRODUCTS[node.op]
            if not node.attr[of_input].b:
                self._write_product(node, name, value.T if node.attr[of_weight].b else value, scale)
                return
        if axes and tuple(axes) != tuple(range(axes[0], len(shape))):
            raise QuantizeError(
                f"the weight of {place.name} has scales along its axes {list(axes)}, and its shape is {shape}; "
                "TensorFlow's converter knows those of the last axis: let per_channel be False"
            )
        flat = value.reshape(*shape[: axes[0]], -1) if axes else value
        made = self._fake(name, self._constant(f"{name}/values", flat), scale)
        node.input[index] = made if flat.shape == shape else self._reshaped(f"{name}/whole", made, shape)

    def _write_product(self, node: Any, name: str, weight: NDArray[Any], scale: Scale) -> None:
        """Let a convolution of 1x1 take the place of a product with a matrix of (inputs, outputs).

        The converter transposes matrices, and refuses to do so where each output has a scale.
        """
        inputs, outputs = weight.shape
        x = self._reshaped(f"{name}/input", node.input[0], (-1, 1, 1, inputs))
        values = self._constant(f"{name}/values", weight.reshape(1, 1, inputs, outputs))
        made = self._node(
            "Conv2D", f"{name}/product", [x, self._fake(name, values, scale)], T=_float32(), strides=[1] * 4,
            padding=b"VALID",
        )  # fmt: skip
        shape = [-1 if size is None else size for size in self._shapes(f"{node.name}:0").shape]
        product, node.name = node.name, f"{node.name}/unread"
        self._reshaped(product, made, shape)

    def _fake(self, name: str, value: str, scale: Scale) -> str:
        ends = [np.float32((end - scale.zero_point) * scale.scale) for end in (scale.grid.low, scale.grid.high)]
        held = [self._constant(f"{name}/{end}", array) for end, array in zip(("min", "max"), ends, strict=True)]
        kind = "FakeQuantWithMinMaxVars" + "PerChannel" * bool(scale.axes)
        return self._node(kind, name, [value, *held])

    def _reshaped(self, name: str, value: str, shape: Sequence[int]) -> str:
        target = self._constant(f"{name}/shape", np.array(shape, np.int32))
        return self._node("Reshape", name, [value, target], T=_float32())

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        import tensorflow as tf

        held = tf.make_tensor_proto(array)
        return self._node("Const", name, [], dtype=held.dtype, value=held)

    def _node(self, op: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        import tensorflow as tf

        node = self._definition.node.add(op=op, name=name, input=inputs)
        for key, value in attributes.items():
            kinds = {int: "type", bytes: "s", list: "list"}
            field = kinds.get(type(value), "tensor")
            held = tf.compat.v1.AttrValue.ListValue(i=value) if field == "list" else value
            node.attr[key].CopyFrom(tf.compat.v1.AttrValue(**{field: held}))
        return name


_PRODUCTS = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV2": ("adj_x", "adj_y")}
"""Types of products, and their attributes that transpose the input and the weight."""


def _float32() -> int:
    import tensorflow as tf

    return int(tf.float32.as_datatype_enum)


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
        for graph in self._model.subgraphs:
            made = {output: one for one in graph.operators for output in one.outputs}
            kinds = [names[max(one.builtinCode, one.deprecatedBuiltinCode)] for one in self._model.operatorCodes]
            for one in graph.operators:
                kind, output = kinds[one.opcodeIndex], graph.tensors[one.outputs[0]]
                if kind in _MOVES or output.type != self._schema.TensorType.FLOAT32:
                    continue
                read = {kinds[made[i].opcodeIndex] for i in one.inputs if i in made}
                readers = {kinds[each.opcodeIndex] for each in graph.operators if one.outputs[0] in each.inputs}
                why = _NO_KERNEL if readers == {"QUANTIZE"} else _NO_OUTPUT
                known = [modules[n] for i in one.inputs for n in _names(graph.tensors[i]) if n in modules]
                found[f"{kind} of {[*known, *_names(output)][0]}"] = why if read == {"DEQUANTIZE"} else _NO_INPUT
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
    return bool(np.isclose(found.scale[0], scale.scale, 1e-6) and found.zeroPoint[0] == _zero_point(scale))


def _zero_point(scale: Scale) -> int:
    """Return the zero point of an activation among signed integers."""
    return int(scale.zero_point) - scale.grid.low - 128

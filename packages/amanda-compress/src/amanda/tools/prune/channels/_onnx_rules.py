"""The rules of ONNX' ops: those of PyTorch's, with the names of its arguments, and some of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call
from amanda.tools.prune.channels._labels import Families, Part, shaped
from amanda.tools.prune.channels._layers import (
    batch_norm,
    convolution,
    embedding,
    group_norm,
    layer_norm,
    matrix_product,
    product,
    transposed_convolution,
)
from amanda.tools.prune.channels._rules import (
    Rule,
    along_axis,
    concatenated,
    elementwise,
    fresh,
    kept,
    laid_out,
    reduced,
    unknown,
)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that a node reads or makes.

    root: name of the initializer that it is, or is made of alone.
    """

    name: str
    array: Any
    root: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extents."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return int(self.array.ndim)


def gemm(call: Call) -> Sequence[Families]:
    """Multiply two matrices, either transposed, and add a third."""
    one, other, added = (*call.inputs[:2], call.value("C"))
    left = _turned(call.part(one)) if call.value("transA") else call.part(one)
    right = _turned(call.part(other)) if call.value("transB") else call.part(other)
    made = matrix_product(call, left, right, other)
    if added is not None:
        made = call.labels.merged([call.part(added), (made, call.outputs[0].shape)], call.lacking)
    return [made]


def _turned(part: Part) -> Part:
    families, shape = part
    return tuple(one.T for one in families), shape[::-1]


def from_axis_on(call: Call) -> Sequence[Families]:
    """Keep an axis and all after it whole: before opset 13 a softmax is over all of them."""
    rank = call.inputs[0].ndim
    axes = range(call.value("dim", 1) % rank, rank)
    return [call.labels.pinned(call.of(call.inputs[0]), axes, f"{call.place} computes over them")]


def depth_to_space(call: Call) -> Sequence[Families]:
    """Move channels into images: those that go to one channel go together."""
    own, area = call.along(call.of(call.inputs[0]), 1), int(call.value("blocksize")) ** 2
    if own is None:
        return [()]
    is_inner = call.value("mode", "DCR") == "CRD"
    read = own.reshape(-1, area) if is_inner else own.reshape(area, -1).T
    call.labels.unite(read, read[:, :1])
    return [shaped(read[:, 0], 1, 4)]


def space_to_depth(call: Call) -> Sequence[Families]:
    """Move images into channels, as many of each."""
    own, area = call.along(call.of(call.inputs[0]), 1), int(call.value("blocksize")) ** 2
    return [shaped(None if own is None else np.tile(own, area), 1, 4)]


_Entry = tuple[Rule, str, Mapping[str, str]]
_ELEMENTWISE = (
    "Abs Add And Ceil Celu Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid "
    "HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow "
    "Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Swish Tanh ThresholdedRelu "
    "Where Xor"
)
_KEPT = (
    "AveragePool Cast Dropout GlobalAveragePool GlobalLpPool GlobalMaxPool Identity LpPool MaxPool Pad "
    "Resize Upsample"
)
_MOVED = "Expand Flatten Reshape Slice Split Squeeze Tile Transpose Unsqueeze"
_OVER_AN_AXIS = "ArgMax ArgMin Hardmax LogSoftmax LpNormalization Softmax"
_REDUCED = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
_TABLE: dict[str, _Entry] = {
    **dict.fromkeys(_ELEMENTWISE.split(), (elementwise, "", {})),
    **dict.fromkeys(_KEPT.split(), (kept, "input", {})),
    **dict.fromkeys(_MOVED.split(), (laid_out, "input", {})),
    **dict.fromkeys(_OVER_AN_AXIS.split(), (along_axis, "input", {"axis": "dim"})),
    **dict.fromkeys(_REDUCED.split(), (reduced, "input dim", {"axes": "dim"})),
    "ArgMax": (reduced, "input", {"axis": "dim"}), "ArgMin": (reduced, "input", {"axis": "dim"}),
    "BatchNormalization": (batch_norm, "input weight bias running_mean running_var", {}),
    "Concat": (concatenated, "tensors", {"axis": "dim"}),
    "Conv": (convolution, "input weight bias", {"group": "groups"}),
    "ConvTranspose": (transposed_convolution, "input weight bias", {"group": "groups"}),
    "CumSum": (along_axis, "input dim", {}),
    "DepthToSpace": (depth_to_space, "input", {"blocksize": "blocksize", "mode": "mode"}),
    "Gather": (laid_out, "input indices", {}),
    "Gemm": (gemm, "A B C", {"transA": "transA", "transB": "transB"}),
    "GroupNormalization": (group_norm, "input weight bias", {"num_groups": "num_groups"}),
    "InstanceNormalization": (batch_norm, "input weight bias", {}),
    "LayerNormalization": (layer_norm, "input weight bias", {"normalized_shape": "normalized_shape"}),
    "MatMul": (product, "A B", {}),
    "Shape": (fresh, "input", {}), "Size": (fresh, "input", {}),
    "SpaceToDepth": (space_to_depth, "input", {"blocksize": "blocksize"}),
    "TopK": (along_axis, "input k", {"axis": "dim"}),
}  # fmt: skip
_COERCED = ("Hardmax", "LogSoftmax", "Softmax")
_QUANTISED = (
    "ConvInteger", "DequantizeLinear", "MatMulInteger", "MatMulNBits", "QLinearConv", "QLinearMatMul",
)  # fmt: skip


def moves(type: str) -> bool:
    """Return True for a node that only moves elements."""
    return type in _TABLE and _TABLE[type][0] is laid_out


def rule_of(
    type: str, attributes: Mapping[str, Any], values: Sequence[Value | None], outputs: int, opset: int
) -> tuple[Rule, list[str], list[Any]]:
    """Return the rule of a node, and its inputs and attributes as the rule names them.

    type: ONNX' one, with a domain where that is not ONNX' own.  opset: version of ONNX' own domain.
    """
    rule, named, renamed = _TABLE.get(type, (unknown, "", {}))
    names, inputs = named.split(), list[Any](values)
    shape = values[0].shape if values and values[0] is not None else ()
    if type == "Concat":
        inputs = [inputs]
    elif type in _COERCED and opset < 13:
        rule = from_axis_on
    elif type == "Gather" and _is_embedding(attributes, values):
        rule, names = embedding, ["weight", "index"]
    elif type == "LayerNormalization":
        axis = attributes.get("axis", -1)
        attributes = {"normalized_shape": shape[axis:]}
        rule = rule if outputs == 1 else unknown
    elif (type == "GroupNormalization" and opset < 21) or attributes.get("training_mode"):
        rule = unknown
    elif type in _REDUCED and attributes.get("noop_with_empty_axes") and not _axes(attributes, values):
        rule = kept
    names += ["" for _ in inputs[len(names) :]]
    inputs += [None for _ in names[len(inputs) :]]
    for i, (name, value) in enumerate(zip(names, inputs, strict=True)):
        if name == "dim" and value is not None:
            inputs[i] = value.array.tolist()
    for theirs, ours in renamed.items():
        if theirs in attributes:
            names.append(ours)
            inputs.append(attributes[theirs])
    return rule, names, inputs


def _is_embedding(attributes: Mapping[str, Any], values: Sequence[Value | None]) -> bool:
    table = values[0]
    held = table is not None and table.root is not None and table.ndim == 2
    return held and attributes.get("axis", 0) == 0


def _axes(attributes: Mapping[str, Any], values: Sequence[Value | None]) -> bool:
    given = values[1] if len(values) > 1 else None
    return bool(attributes.get("axes")) or (given is not None and given.array.size > 0)


def unfollowed(type: str, values: Sequence[Value | None], channels: Sequence[Families]) -> str:
    """Return why the channels of a layer's weight are not followed; "" of any other node."""
    if type in _QUANTISED:
        return f"{type} computes with quantized weights"
    if type in ("Conv", "ConvTranspose", "Gemm") and len(values) > 1:
        weight = values[1]
        if weight is not None and prod(weight.shape) > 1 and not channels[1]:
            return "its weight is no floating-point initializer"
    return ""

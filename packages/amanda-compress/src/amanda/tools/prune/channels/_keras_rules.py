"""The rules of TensorFlow's ops as Keras calls them: those of PyTorch's, and some of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call, Work
from amanda.tools.prune.channels._labels import Families, shaped
from amanda.tools.prune.channels._layers import convolution, embedding, product, transposed_convolution
from amanda.tools.prune.channels._rules import (
    Rule,
    along_axis,
    concatenated,
    elementwise,
    fresh,
    kept,
    laid_out,
    reduced,
    stacked,
    unknown,
)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that an op reads or makes, with its channels.

    name: path of the weight that it is.
    """

    tensor: Any
    shape: tuple[int, ...]
    families: Families = ()
    name: str | None = None

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def turned(self, axes: Sequence[int]) -> Value:
        """Return the tensor with its axes in another order."""
        families = tuple(one.transpose(axes) for one in self.families)
        return Value(self.tensor, tuple(self.shape[i] for i in axes), families, self.name)


def channels_first(rule: Rule) -> Rule:
    """Return a rule for data whose channels are last, and weights of which in and out are."""

    def turned(call: Call) -> Sequence[Families]:
        if call.value("data_format") not in ("NHWC", "NDHWC"):
            return unknown(call)
        rank = call.inputs[0].ndim
        front, outwards = (0, rank - 1, *range(1, rank - 1)), (rank - 1, rank - 2, *range(rank - 2))
        value, weight, *others = call.inputs
        inner = replace(
            call, inputs=[value.turned(front), weight.turned(outwards), *others],
            outputs=[call.outputs[0].turned(front)],
        )  # fmt: skip
        return [tuple(one.transpose(np.argsort(front)) for one in families) for families in rule(inner)]

    return turned


def depthwise(call: Call) -> Sequence[Families]:
    """Match channels with those of the weight, of which each makes as many outputs."""
    value, weight, made = *call.inputs[:2], call.outputs[0]
    if call.value("data_format") != "NHWC":
        return unknown(call)
    others = [one for one in call.of(weight) if one.shape[2] == 1]
    call.labels.leave(others, "")
    own = call.along(tuple(one for one in call.of(weight) if one.shape[2] > 1), 2)
    call.match(call.along(call.of(value), -1), own)
    outputs = None if own is None else np.repeat(own, weight.shape[3])
    call.labels.produce(outputs)
    call.notes.work.append(Work(prod(made.shape) * prod(weight.shape[:2]), outputs, None))
    return [shaped(outputs, made.ndim - 1, made.ndim)]


def multiplied(call: Call) -> Sequence[Families]:
    """Multiply matrices, either of them transposed."""
    factors = [
        one.turned((*range(one.ndim - 2), one.ndim - 1, one.ndim - 2)) if call.value(name) else one
        for one, name in zip(call.inputs[:2], ("turned_a", "turned_b"), strict=True)
    ]
    return product(replace(call, inputs=[*factors, *call.inputs[2:]]))


_ELEMENTWISE = (
    "Abs Add AddV2 Ceil ClipByValue Cos DivNoNan Elu Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater "
    "GreaterEqual LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul "
    "MulNoNan Neg NotEqual Pow RealDiv Reciprocal Relu Relu6 Round Rsqrt Select SelectV2 Selu Sigmoid Sign "
    "Sin Softplus Softsign Sqrt Square SquaredDifference Sub Tanh"
)
_KEPT = (
    "AvgPool AvgPool3D BatchToSpaceND Cast Identity MaxPool MaxPool3D MaxPoolV2 MirrorPad Pad PadV2 "
    "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToBatchND StopGradient"
)
_MOVED = "BroadcastTo ExpandDims Reshape ReverseV2 Slice SplitV Squeeze StridedSlice Tile Transpose Unpack"
_LAYOUT = {"data_format": "data_format"}
_Entry = tuple[Rule, str, Mapping[str, str]]
_TABLE: dict[str, _Entry] = {
    **dict.fromkeys(_ELEMENTWISE.split(), (elementwise, "", {})),
    **dict.fromkeys(_KEPT.split(), (kept, "input", {})),
    **dict.fromkeys(_MOVED.split(), (laid_out, "input", {})),
    **dict.fromkeys("LogSoftmax Softmax".split(), (along_axis, "input", {})),
    **dict.fromkeys("All Any ArgMax ArgMin Max Mean Min Prod Sum".split(), (reduced, "input dim", {})),
    **dict.fromkeys("Rank Shape Size".split(), (fresh, "input", {})),
    **dict.fromkeys("Conv2D Conv3D".split(), (channels_first(convolution), "input weight", _LAYOUT)),
    **dict.fromkeys(
        "Conv2DBackpropInput Conv3DBackpropInputV2".split(),
        (channels_first(transposed_convolution), "input weight", _LAYOUT),
    ),
    "BatchMatMulV2": (multiplied, "a b", {"adj_x": "turned_a", "adj_y": "turned_b"}),
    "ConcatV2": (concatenated, "tensors dim", {}),
    "DepthwiseConv2dNative": (depthwise, "input weight", _LAYOUT),
    "MatMul": (multiplied, "a b", {"transpose_a": "turned_a", "transpose_b": "turned_b"}),
    "Pack": (stacked, "tensors", {"axis": "dim"}),
    "Split": (laid_out, "input", {}),
}  # fmt: skip


def first_of(type: str) -> int:
    """Return the position of the tensor whose channels an op passes on."""
    return {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2, "Split": 1}.get(type, 0)


def rule_of(
    type: str, attributes: Mapping[str, Any], values: Sequence[Any]
) -> tuple[Rule, list[str], list[Any]]:
    """Return the rule of an op, and its inputs and attributes as the rule names them.

    type: TensorFlow's.  values: a Value for each tensor, a list of these where several are one input.
    """
    rule, named, renamed = _TABLE.get(type, (unknown, "", {}))
    inputs = list(values)
    inputs.insert(0, inputs.pop(first_of(type)))
    if type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
        inputs = [inputs[0], inputs[2]]
    elif type == "BiasAdd":
        rule = elementwise if _text(attributes["data_format"]) == "NHWC" else unknown
    elif type in ("GatherV2", "ResourceGather") and inputs[0].name is not None:
        rule, named = embedding, "weight index"
    names = named.split()
    names += ["" for _ in inputs[len(names) :]]
    for i, name in enumerate(names):
        if name == "dim":
            inputs[i] = inputs[i].tensor.numpy().tolist()
    for theirs, ours in renamed.items():
        names.append(ours)
        inputs.append(_text(attributes[theirs]))
    if type in ("Conv2D", "Conv3D"):
        names.append("groups")
        inputs.append(inputs[0].shape[-1] // inputs[1].shape[-2])
    return rule, names, inputs


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value

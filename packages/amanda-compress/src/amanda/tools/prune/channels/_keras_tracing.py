"""Channels of a Keras model, followed through a call in eager TensorFlow by rules of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import amanda
from amanda.backend import TensorMap
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._labels import Families, Family, FollowedOp, Work, shaped
from amanda.tools.prune.channels._prunable_model import Tracing, tensors_in
from amanda.tools.prune.channels._rules import (
    Rule,
    concatenated,
    convolution,
    elementwise,
    embedding,
    fresh,
    over_axis,
    product,
    rearranged,
    reduced,
    same_channels,
    stacked,
    transposed_convolution,
    unknown,
)

if TYPE_CHECKING:
    from amanda.tools.prune.channels._keras import KerasModel


@dataclass(frozen=True, eq=False)
class KerasValue:
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

    def transposed(self, axes: Sequence[int]) -> KerasValue:
        """Return the tensor with its axes in another order."""
        families = tuple(family.transpose(axes) for family in self.families)
        return KerasValue(self.tensor, tuple(self.shape[i] for i in axes), families, self.name)


def channels_first(rule: Rule) -> Rule:
    """Return a rule for data whose channels are last, and weights whose last axes are inputs and outputs."""

    def follow(call: FollowedOp) -> Sequence[Families]:
        """Follow an op by the rule in PyTorch's order of axes; keep all whole for another order."""
        if call.value("data_format") not in ("NHWC", "NDHWC"):
            return unknown(call)
        # Rules are written once, for PyTorch's order of axes: tensors are transposed, and families back.
        rank = call.inputs[0].ndim
        channels_second = 0, rank - 1, *range(1, rank - 1)
        outputs_first = rank - 1, rank - 2, *range(rank - 2)
        value, weight, *other_inputs = call.inputs
        transposed_call = replace(
            call, inputs=[value.transposed(channels_second), weight.transposed(outputs_first), *other_inputs],
            outputs=[call.outputs[0].transposed(channels_second)],
        )  # fmt: skip
        channels_last = np.argsort(channels_second)  # the inverse order
        return [
            tuple(family.transpose(channels_last) for family in families)
            for families in rule(transposed_call)
        ]

    return follow


def depthwise(call: FollowedOp) -> Sequence[Families]:
    """Match channels with the weight's, each of which makes as many outputs as the multiplier says.

    Notes the layer and its work; leaves all whole for another data format than NHWC.
    """
    value, weight, output = *call.inputs[:2], call.outputs[0]
    if call.value("data_format") != "NHWC":
        return unknown(call)
    # The kernel is (height, width, channels, multiplier).
    multiplier_families = [family for family in call.families_of(weight) if family.shape[2] == 1]
    call.labels.leave_whole(multiplier_families, "")
    channel_families = tuple(family for family in call.families_of(weight) if family.shape[2] > 1)
    channels = call.labels_along(channel_families, 2)
    call.match(call.labels_along(call.families_of(value), -1), channels)
    # Channel i makes the outputs i * m to i * m + m - 1.
    multiplier = weight.shape[3]
    outputs = None if channels is None else np.repeat(channels, multiplier)
    call.labels.mark_outputs(outputs)
    call.notes.work.append(Work(prod(output.shape) * prod(weight.shape[:2]), outputs, None))
    return [shaped(outputs, output.ndim - 1, output.ndim)]


def multiplied(call: FollowedOp) -> Sequence[Families]:
    """Follow a product of matrices, either of them transposed, as one of matrices in order."""
    first, second, *other_inputs = call.inputs
    factors = [
        _with_swapped_matrix_axes(factor) if call.value(is_transposed) else factor
        for factor, is_transposed in ((first, "transposed_a"), (second, "transposed_b"))
    ]
    return product(replace(call, inputs=[*factors, *other_inputs]))


def _with_swapped_matrix_axes(value: KerasValue) -> KerasValue:
    return value.transposed((*range(value.ndim - 2), value.ndim - 1, value.ndim - 2))


_ELEMENTWISE = (
    "Abs Add AddV2 Ceil ClipByValue Cos DivNoNan Elu Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater "
    "GreaterEqual LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul "
    "MulNoNan Neg NotEqual Pow RealDiv Reciprocal Relu Relu6 Round Rsqrt Select SelectV2 Selu Sigmoid Sign "
    "Sin Softplus Softsign Sqrt Square SquaredDifference Sub Tanh"
)
_SAME_CHANNELS = (
    "AvgPool AvgPool3D BatchToSpaceND Cast Identity MaxPool MaxPool3D MaxPoolV2 MirrorPad Pad PadV2 "
    "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToBatchND StopGradient"
)
_REARRANGED = (
    "BroadcastTo ExpandDims Reshape ReverseV2 Slice SplitV Squeeze StridedSlice Tile Transpose Unpack"
)
_LAYOUT = {"data_format": "data_format"}
_Entry = tuple[Rule, str, Mapping[str, str]]  # a rule, its names of inputs, its names of attributes
_TABLE: dict[str, _Entry] = {
    **dict.fromkeys(_ELEMENTWISE.split(), (elementwise, "", {})),
    **dict.fromkeys(_SAME_CHANNELS.split(), (same_channels, "input", {})),
    **dict.fromkeys(_REARRANGED.split(), (rearranged, "input", {})),
    **dict.fromkeys("LogSoftmax Softmax".split(), (over_axis, "input", {})),
    **dict.fromkeys("All Any ArgMax ArgMin Max Mean Min Prod Sum".split(), (reduced, "input dim", {})),
    **dict.fromkeys("Rank Shape Size".split(), (fresh, "input", {})),
    **dict.fromkeys("Conv2D Conv3D".split(), (channels_first(convolution), "input weight", _LAYOUT)),
    **dict.fromkeys(
        "Conv2DBackpropInput Conv3DBackpropInputV2".split(),
        (channels_first(transposed_convolution), "input weight", _LAYOUT),
    ),
    "BatchMatMulV2": (multiplied, "a b", {"adj_x": "transposed_a", "adj_y": "transposed_b"}),
    "ConcatV2": (concatenated, "tensors dim", {}),
    "DepthwiseConv2dNative": (depthwise, "input weight", _LAYOUT),
    "MatMul": (multiplied, "a b", {"transpose_a": "transposed_a", "transpose_b": "transposed_b"}),
    "Pack": (stacked, "tensors", {"axis": "dim"}),
    "Split": (rearranged, "input", {}),
}  # fmt: skip


def channel_input_of(type: str) -> int:
    """Return the position of the tensor whose channels an op passes on."""
    return {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2, "Split": 1}.get(type, 0)


def rule_of(
    type: str, attributes: Mapping[str, Any], values: Sequence[Any]
) -> tuple[Rule, list[str], list[Any]]:
    """Return the rule of an op, names of its inputs and attributes for the rule, and their values.

    type: TensorFlow's.  values: a KerasValue for each tensor, a list of these where several are one input.
    """
    rule, input_names, name_of_attribute = _TABLE.get(type, (unknown, "", {}))
    inputs = list(values)
    # Rules expect the tensor whose channels pass on first; TensorFlow has sizes or an axis before it in some
    # ops.
    inputs.insert(0, inputs.pop(channel_input_of(type)))
    if type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
        inputs = [inputs[0], inputs[2]]
    elif type == "BiasAdd":
        rule = elementwise if _text(attributes["data_format"]) == "NHWC" else unknown
    elif type in ("GatherV2", "ResourceGather") and inputs[0].name is not None:
        rule, input_names = embedding, "weight index"
    names = input_names.split()
    names += ["" for _ in inputs[len(names) :]]  # rules do not read the inputs behind
    for i, name in enumerate(names):
        if name == "dim":
            # Axes are tensors in TensorFlow.
            inputs[i] = inputs[i].tensor.numpy().tolist()
    for attribute, name in name_of_attribute.items():
        names.append(name)
        inputs.append(_text(attributes[attribute]))
    if type in ("Conv2D", "Conv3D"):
        # The second axis from behind of a kernel has the inputs of one group.
        names.append("groups")
        inputs.append(inputs[0].shape[-1] // inputs[1].shape[-2])
    return rule, names, inputs


def _text(value: Any) -> Any:
    """Return bytes as text, as TensorFlow has it in attributes; other values unchanged."""
    return value.decode() if isinstance(value, bytes) else value


class KerasTracing(Tracing):
    """Follows channels from op to op, where tensors are objects."""

    def __init__(self, model: KerasModel) -> None:
        super().__init__()
        self._model = model
        self._families_of: TensorMap[Families] = TensorMap()
        self._names: TensorMap[str] = TensorMap()
        self._path_by_handle = model.path_by_handle()
        self._open_inputs: list[list[Any]] = []  # of ops that have begun, the innermost last

    def follow(self, example: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model, keep its result's channels and weights of unknown size whole; return the result."""
        with amanda.apply(self):
            self.result = self._model(*example, **kwargs)
        labels = self.notes.labels
        for value in tensors_in(self.result):
            labels.leave_whole(self._families_of.get(value) or (), "the model returns them")
        for path, why in self._model.weights_of_unknown_size():
            labels.leave_whole(self.weight_families.get(path, ()), why)
        labels.settle_blocks()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the layer that has a weight."""
        return name.rpartition("/")[0]

    def _analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines before and after a forward op."""
        if context["phase"] != "forward":
            return
        context.insert_before_op(self._push_inputs)
        context.insert_after_op(
            self._follow_channels,
            tf_type=context.get_op_type(), word=context["type"], op_id=context.get_op_id(),
            attributes=dict(context.get_attrs()), module=context.get_scope(),
        )  # fmt: skip

    @amanda.observer
    def _push_inputs(self, *inputs: Any) -> None:
        """Push the inputs of an op, with their channels, for `_follow_channels`."""
        self._open_inputs.append([self._with_channels(value) for value in inputs])

    @amanda.observer
    def _follow_channels(
        self,
        *outputs: Any,
        tf_type: str,
        word: str,
        op_id: int,
        attributes: Mapping[str, Any],
        module: str,
    ) -> None:
        """Follow an op by its rule, store the families of its outputs, and append it to `traced_ops`.

        Pops the inputs that `_push_inputs` pushed.  A read of a variable is not appended, whose output is the
        weight itself for the ops that follow, and no Squeeze.
        tf_type: TensorFlow's name of the op.  word: StandardMapping's, by which rules know the op.
        """
        values = self._open_inputs.pop()
        output_tensors = leaves(outputs)
        if tf_type == "ReadVariableOp":
            self._follow_read_weight(values[0].tensor, output_tensors[0])
            return
        results = [self._with_channels(value) for value in output_tensors]
        input_values = leaves(values)
        rule, names, inputs = rule_of(tf_type, attributes, values) if values else (fresh, [], [])
        move = partial(_move_labels, tf_type, attributes, values)
        if rule is reduced:
            # By TensorFlow's own name rules note no mean over kept channels: a mask finds an op by its key,
            # and ops of a compiled function have no keys of eager ones.
            word = tf_type
        elif tf_type == "BiasAdd":
            word = "add"  # as Keras adds the bias once one channel remains, see below
        call = FollowedOp(
            type=word, place=f"{word} of {module or 'the model'}", key=op_id, inputs=inputs, names=names,
            outputs=results, find_families=_families, move=move, notes=self.notes, name_of=_name,
        )  # fmt: skip
        if not any(value.families for value in input_values):
            output_families = fresh(call)
        elif results:
            output_families = rule(call)
        else:  # the op gives no tensor, so that nothing shows what becomes of the channels
            output_families = unknown(call)
        # Mixed precision casts each weight before it is used.
        passes_weight = tf_type in ("Cast", "Identity") and input_values[0].name is not None
        for output, families in zip(output_tensors, output_families, strict=True):
            if families:
                self._families_of[output] = families
            if passes_weight:
                self._names[output] = input_values[0].name
        # The smaller model has to trace the same ops: Keras adds a bias by Squeeze and BiasAdd, and a bias of
        # one channel by an addition alone.
        if tf_type != "Squeeze":
            input_parts = [(value.families, value.shape) for value in input_values]
            self.note_op(call, rule, module, module, input_parts, output_families)

    def _follow_read_weight(self, handle: Any, tensor: Any) -> None:
        """Note that a tensor is a weight, with its name and families; nothing for another variable."""
        # Weights enter the program here: the tensor is the weight for all ops that follow.
        name = self._path_by_handle.get(handle)
        if name is not None:
            self._names[tensor] = name
            families = self.weight_families.get(name)
            self._families_of[tensor] = (
                self.new_families(name, tuple(tensor.shape)) if families is None else families
            )

    def _with_channels(self, tensor: Any) -> Any:
        """Return a tensor with its channels, a list of these for a list."""
        if isinstance(tensor, (list, tuple)):
            return [self._with_channels(item) for item in tensor]
        shape = tuple(getattr(tensor, "shape", ()))
        return KerasValue(tensor, shape, self._families_of.get(tensor) or (), self._names.get(tensor))


def _families(value: Any) -> Families:
    return value.families if isinstance(value, KerasValue) else ()


def _name(value: Any) -> str | None:
    return value.name if isinstance(value, KerasValue) else None


def _move_labels(
    type: str, attributes: Mapping[str, Any], values: Sequence[Any], family: Family
) -> list[Family]:
    """Return a family moved as an op moves elements, for each output: the op runs on labels instead of them.

    family: of the tensor that the op moves; it is broadcast to the tensor's shape.
    """
    import tensorflow as tf

    # Raw ops are named as ops are, so that any op that moves elements is run on labels without a table.
    compute, label_position = getattr(tf.raw_ops, type), channel_input_of(type)
    labels = tf.constant(np.ascontiguousarray(np.broadcast_to(family, values[label_position].shape)))
    inputs = [labels if i == label_position else value.tensor for i, value in enumerate(values)]
    # The raw op of Squeeze has a parameter `axis` for its attribute `squeeze_dims`.
    raw_attributes = {**attributes, "axis": attributes.get("axis", attributes.get("squeeze_dims"))}
    names = list(signature(compute).parameters)
    input_names, attribute_names = names[: len(inputs)], names[len(inputs) :]
    keywords = {
        name: raw_attributes[name] for name in attribute_names if raw_attributes.get(name) is not None
    }
    outputs = compute(**dict(zip(input_names, inputs, strict=False)), **keywords)
    return [value.numpy() for value in leaves([outputs])]

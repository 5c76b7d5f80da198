"""Channels of an ONNX model, followed through a run of its session by rules of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._labels import Families, Family, FollowedOp, Part, shaped
from amanda.tools.prune.channels._prunable_model import Tracing
from amanda.tools.prune.channels._rules import (
    Rule,
    batch_norm,
    concatenated,
    convolution,
    elementwise,
    embedding,
    fresh,
    group_norm,
    layer_norm,
    matrix_product,
    over_axis,
    product,
    rearranged,
    reduced,
    same_channels,
    transposed_convolution,
    unknown,
)

if TYPE_CHECKING:
    from amanda.tools.prune.channels._onnx import OnnxModel


@dataclass(frozen=True, eq=False)
class OnnxValue:
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


def gemm(call: FollowedOp) -> Sequence[Families]:
    """Follow a product of two matrices, either of them transposed, to which a third is added."""
    first, second, summand = (*call.inputs[:2], call.value("C"))
    first_part = _transposed(call.part_of(first)) if call.value("transA") else call.part_of(first)
    second_part = _transposed(call.part_of(second)) if call.value("transB") else call.part_of(second)
    families = matrix_product(call, first_part, second_part, second)
    if summand is not None:
        families = call.labels.unite_elementwise(
            [call.part_of(summand), (families, call.outputs[0].shape)], call.lacking_reason
        )
    return [families]


def _transposed(part: Part) -> Part:
    """Return the families and extents of a transposed matrix."""
    families, shape = part
    return tuple(family.T for family in families), shape[::-1]


def from_axis_on(call: FollowedOp) -> Sequence[Families]:
    """Keep an axis and all after it whole: before opset 13 a softmax is over all of them."""
    rank = call.inputs[0].ndim
    axes = range(call.value("dim", 1) % rank, rank)
    return [call.labels.pin_axes(call.families_of(call.inputs[0]), axes, f"{call.place} computes over them")]


def depth_to_space(call: FollowedOp) -> Sequence[Families]:
    """Unite the channels that the op moves into the image of one channel: these go together."""
    channels = call.labels_along(call.families_of(call.inputs[0]), 1)
    area = int(call.value("blocksize")) ** 2
    if channels is None:
        return [()]
    # Rows of `grouped` are the channels of one output channel; in mode CRD they are neighbours.
    are_neighbours = call.value("mode", "DCR") == "CRD"
    grouped = channels.reshape(-1, area) if are_neighbours else channels.reshape(area, -1).T
    call.labels.unite(grouped, grouped[:, :1])
    return [shaped(grouped[:, 0], 1, 4)]


def space_to_depth(call: FollowedOp) -> Sequence[Families]:
    """Repeat the channels, of each of which the op makes one for each place of a block."""
    channels = call.labels_along(call.families_of(call.inputs[0]), 1)
    area = int(call.value("blocksize")) ** 2
    return [shaped(None if channels is None else np.tile(channels, area), 1, 4)]


_Entry = tuple[Rule, str, Mapping[str, str]]  # a rule, its names of inputs, its names of attributes
_ELEMENTWISE = (
    "Abs Add And Ceil Celu Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid "
    "HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow "
    "Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Swish Tanh ThresholdedRelu "
    "Where Xor"
)
_SAME_CHANNELS = (
    "AveragePool Cast Dropout GlobalAveragePool GlobalLpPool GlobalMaxPool Identity LpPool MaxPool Pad "
    "Resize Upsample"
)
_REARRANGED = "Expand Flatten Reshape Slice Split Squeeze Tile Transpose Unsqueeze"
_OVER_AN_AXIS = "ArgMax ArgMin Hardmax LogSoftmax LpNormalization Softmax"
_REDUCED = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
_TABLE: dict[str, _Entry] = {
    **dict.fromkeys(_ELEMENTWISE.split(), (elementwise, "", {})),
    **dict.fromkeys(_SAME_CHANNELS.split(), (same_channels, "input", {})),
    **dict.fromkeys(_REARRANGED.split(), (rearranged, "input", {})),
    **dict.fromkeys(_OVER_AN_AXIS.split(), (over_axis, "input", {"axis": "dim"})),
    **dict.fromkeys(_REDUCED.split(), (reduced, "input dim", {"axes": "dim"})),
    "ArgMax": (reduced, "input", {"axis": "dim"}), "ArgMin": (reduced, "input", {"axis": "dim"}),
    "BatchNormalization": (batch_norm, "input weight bias running_mean running_var", {}),
    "Concat": (concatenated, "tensors", {"axis": "dim"}),
    "Conv": (convolution, "input weight bias", {"group": "groups"}),
    "ConvTranspose": (transposed_convolution, "input weight bias", {"group": "groups"}),
    "CumSum": (over_axis, "input dim", {}),
    "DepthToSpace": (depth_to_space, "input", {"blocksize": "blocksize", "mode": "mode"}),
    "Gather": (rearranged, "input indices", {}),
    "Gemm": (gemm, "A B C", {"transA": "transA", "transB": "transB"}),
    "GroupNormalization": (group_norm, "input weight bias", {"num_groups": "num_groups"}),
    "InstanceNormalization": (batch_norm, "input weight bias", {}),
    "LayerNormalization": (layer_norm, "input weight bias", {"normalized_shape": "normalized_shape"}),
    "MatMul": (product, "A B", {}),
    "Shape": (fresh, "input", {}), "Size": (fresh, "input", {}),
    "SpaceToDepth": (space_to_depth, "input", {"blocksize": "blocksize"}),
    "TopK": (over_axis, "input k", {"axis": "dim"}),
}  # fmt: skip
_FLATTENED_BEFORE_13 = ("Hardmax", "LogSoftmax", "Softmax")
_QUANTISED = (
    "ConvInteger", "DequantizeLinear", "MatMulInteger", "MatMulNBits", "QLinearConv", "QLinearMatMul",
)  # fmt: skip


def only_moves(type: str) -> bool:
    """Return True for a node that only moves elements."""
    return type in _TABLE and _TABLE[type][0] is rearranged


def rule_of(
    type: str,
    attributes: Mapping[str, Any],
    values: Sequence[OnnxValue | None],
    output_count: int,
    opset: int,
) -> tuple[Rule, list[str], list[Any]]:
    """Return the rule of a node, names of its inputs and attributes for the rule, and their values.

    type: ONNX' one, with a domain where that is not ONNX' own.  opset: version of ONNX' own domain.
    """
    rule, input_names, name_of_attribute = _TABLE.get(type, (unknown, "", {}))
    names, inputs = input_names.split(), list[Any](values)
    shape = values[0].shape if values and values[0] is not None else ()
    if type == "Concat":
        inputs = [inputs]
    # Older versions flatten all axes behind the given one before they normalise.
    elif type in _FLATTENED_BEFORE_13 and opset < 13:
        rule = from_axis_on
    elif type == "Gather" and _is_embedding(attributes, values):
        rule, names = embedding, ["weight", "index"]
    elif type == "LayerNormalization":
        axis = attributes.get("axis", -1)
        attributes = {"normalized_shape": shape[axis:]}
        # Mean and variance as further outputs would be over fewer channels.
        rule = rule if output_count == 1 else unknown
    elif (type == "GroupNormalization" and opset < 21) or attributes.get("training_mode"):
        rule = unknown
    elif type in _REDUCED and attributes.get("noop_with_empty_axes") and not _has_axes(attributes, values):
        rule = same_channels
    # As many names as inputs: names are "" behind the table's, inputs None where the node omits them.
    names += ["" for _ in inputs[len(names) :]]
    inputs += [None for _ in names[len(inputs) :]]
    for i, (name, value) in enumerate(zip(names, inputs, strict=True)):
        if name == "dim" and value is not None:
            inputs[i] = value.array.tolist()
    for attribute, name in name_of_attribute.items():
        if attribute in attributes:
            names.append(name)
            inputs.append(attributes[attribute])
    return rule, names, inputs


def _is_embedding(attributes: Mapping[str, Any], values: Sequence[OnnxValue | None]) -> bool:
    """Return True if a Gather selects rows, along axis 0, of a weight that is a matrix."""
    table = values[0]
    is_weight = table is not None and table.root is not None and table.ndim == 2
    return is_weight and attributes.get("axis", 0) == 0


def _has_axes(attributes: Mapping[str, Any], values: Sequence[OnnxValue | None]) -> bool:
    """Return True if a reduction names axes, by an attribute or an input."""
    axes = values[1] if len(values) > 1 else None
    return bool(attributes.get("axes")) or (axes is not None and axes.array.size > 0)


def why_unfollowed(type: str, values: Sequence[OnnxValue | None], families: Sequence[Families]) -> str:
    """Return why the channels of a layer's weight are not followed; "" of any other node.

    values, families: of the inputs.
    """
    if type in _QUANTISED:
        return f"{type} computes with quantized weights"
    if type in ("Conv", "ConvTranspose", "Gemm") and len(values) > 1:
        weight = values[1]
        if weight is not None and prod(weight.shape) > 1 and not families[1]:
            return "its weight is no floating-point initializer"
    return ""


class OnnxTracing(Tracing):
    """Follows channels from node to node.

    numbers: arrays of integers that a node reads, by its key and the input's position.
    """

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self.numbers: dict[tuple[str, int], Any] = {}
        self._model, self._weights = model, model.tensors()
        self._families_of: dict[str, Families] = {}
        self._layers: dict[str, str] = {}  # by weight, the module that first read it
        self._open_inputs: dict[str, Sequence[OnnxValue | None]] = {}  # by key, of nodes that have begun

    def follow(self, example: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model, keep the channels of its result whole, and return the result.

        Channels that bodies of control flow read stay whole too.  Where the run fails, the nodes before the
        first that fails are followed, and the error is raised.
        """
        try:
            with amanda.apply(self):
                self.result = self._model(*example, **kwargs)
        except Exception:
            # A session that fails shows no op at all: the prefix that runs shows which node comes next, and
            # so which one failed.
            with self._model.without_failing_nodes(*example, **kwargs), amanda.apply(self):
                self._model(*example, **kwargs)
            raise
        labels = self.notes.labels
        for name in self._model.outputs:
            labels.leave_whole(self._families_of.get(name, ()), "the model returns them")
        for name, reader in self._model.read_in_bodies.items():
            if name in self._families_of or name in self._weights:
                families = self._families(OnnxValue(name, self._weights.get(name)))
                labels.leave_whole(families, f"channels are not followed into the bodies of {reader}")
                if name in self._weights:  # listed among the layers that are left whole
                    for family in families:
                        labels.mark_outputs(family)
        labels.settle_blocks()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the module, or else the name of the node, that first read a weight."""
        return self._layers.get(name, name)

    def _analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines before and after a node of the main graph."""
        key = self._model.op_key(context)
        if key not in self._model.nodes:  # of a body, where nothing can listen
            return
        names_and_roots = tuple(
            None if symbol is None else (symbol.name, symbol.root) for symbol in leaves(context.get_inputs())
        )
        context.insert_before_op(self._store_inputs, key=key, names_and_roots=names_and_roots)
        op = context.get_op()
        output_names = tuple(name for name in op.node.output if name)
        context.insert_after_op(
            self._follow_channels,
            key=key, output_names=output_names, word=context["type"], type=op.type,
            attributes=dict(context.get_attrs()), module=context.get_scope() or op.name, node=op.name,
            compute=context.get_computation() if only_moves(op.type) else None,
        )  # fmt: skip

    @amanda.observer
    def _store_inputs(self, *inputs: Any, key: str, names_and_roots: Sequence[Any]) -> None:
        """Store a node's inputs as OnnxValues, by its key, for `_follow_channels`; None for omitted ones."""
        values: list[OnnxValue | None] = []
        for array, name_and_root in zip(leaves(inputs), names_and_roots, strict=True):
            if name_and_root is None or not isinstance(array, np.ndarray):
                values.append(None)  # an input that the node omits
            else:
                name, root = name_and_root
                values.append(OnnxValue(name, array, root))
        # By key and not on a stack: a session may run independent nodes in another order than the file's.
        self._open_inputs[key] = values

    @amanda.observer
    def _follow_channels(
        self,
        *outputs: Any,
        key: str,
        output_names: Sequence[str],
        word: str,
        type: str,
        attributes: Mapping[str, Any],
        module: str,
        node: str,
        compute: Callable[[Sequence[Any]], Any] | None,
    ) -> None:
        """Follow a node by its rule, store the families of its outputs, and append it to `traced_ops`.

        Removes the inputs that `_store_inputs` stored, and notes in `unfollowed` why a layer is not followed.
        """
        values = self._open_inputs.pop(key)
        arrays = (array for array in leaves(outputs) if isinstance(array, np.ndarray))
        results = [OnnxValue(name, array) for name, array in zip(output_names, arrays, strict=False)]
        input_families = [() if value is None else self._families(value) for value in values]
        self._note_inputs(key, module, values)
        why = why_unfollowed(type, values, input_families)
        if why:
            self.unfollowed[node] = why
        op_rule, names, inputs = rule_of(type, attributes, values, len(results), self._model.opset)
        move = partial(_move_labels, compute, values)
        call = FollowedOp(
            type=word, place=f"{type} {node}", key=key, inputs=inputs, names=names, outputs=results,
            find_families=self._families, move=move, notes=self.notes, name_of=self._name,
        )  # fmt: skip
        # A node without channels computes sizes or masks; one without outputs shows nothing to follow.
        rule = op_rule if any(input_families) else fresh
        output_families = rule(call) if results else unknown(call)
        self._families_of.update(
            (result.name, families)
            for result, families in zip(results, output_families, strict=True)
            if families
        )
        input_parts = [
            (families, value.shape)
            for families, value in zip(input_families, values, strict=True)
            if value is not None
        ]
        self.note_op(call, op_rule, module, node, input_parts, output_families)

    def _note_inputs(self, key: str, module: str, values: Sequence[OnnxValue | None]) -> None:
        """Note the module that first reads a weight, and the integers that a node reads."""
        for i, value in enumerate(values):
            if value is not None and value.root is not None and value.root in self._weights:
                self._layers.setdefault(value.root, module)
            # Shapes and indices computed at run time are needed when sizes are corrected.
            if value is not None and value.array.dtype in (np.int32, np.int64):
                self.numbers[key, i] = value.array

    def _families(self, value: OnnxValue) -> Families:
        """Return the families of a value; a weight has new ones at first."""
        families = self._families_of.get(value.name)
        if families is None and value.name in self._weights:
            families = self._families_of[value.name] = self.new_families(value.name, value.shape)
        return families or ()

    def _name(self, value: Any) -> str | None:
        return value.root if isinstance(value, OnnxValue) and value.root in self._weights else None


def _move_labels(
    compute: Callable[[Sequence[Any]], Any] | None, values: Sequence[OnnxValue | None], family: Family
) -> list[Family]:
    """Return a family of the first input, moved as the node moves elements, for each output."""
    assert compute is not None
    assert values[0] is not None
    labels = np.ascontiguousarray(np.broadcast_to(family, values[0].shape))
    outputs = compute([labels, *(None if value is None else value.array for value in values[1:])])
    return leaves([outputs])

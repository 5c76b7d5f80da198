"""Rules by op: unite labels of channels that go together, return the families (label arrays) of each output.

For the words see `_labels`.  A label that is left whole belongs to a channel that stays.  Axes of channels
count from the end where an input may lack the axis of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from amanda.tools.prune.channels._labels import Families, Family, FollowedOp, Part, Work, shaped, varying


def convolution(call: FollowedOp) -> Sequence[Families]:
    """Match input channels with the weight's; the weight's outputs, which the bias matches, are the op's.

    Notes the layer and its work.  A grouped convolution loses whole groups, or the same place in each group,
    of which there are more.
    """
    value, weight, groups = call.inputs[0], call.inputs[1], int(call.value("groups", 1))
    channel_axis = 1 - weight.ndim
    input_channels = call.labels_along(call.families_of(value), channel_axis)
    outputs = call.labels_along(_channel_families(call, weight, 0), 0)
    inputs = call.labels_along(_channel_families(call, weight, 1), 1)
    # A weight of a grouped convolution has the inputs of one group alone.
    if groups == 1:
        call.match(input_channels, inputs)
    else:
        inputs = _match_groups(call, input_channels, outputs, inputs, weight, groups)
    return _note_layer(call, outputs, inputs, channel_axis, ())


def _match_groups(
    call: FollowedOp,
    input_channels: Family | None,
    outputs: Family | None,
    inputs: Family | None,
    weight: Any,
    groups: int,
) -> Family | None:
    """Match the channels of a grouped convolution; return those of the weight's inputs, None if all stay.

    Input or output channels without the other are left whole.
    input_channels: of the data.  outputs, inputs: of the weight, which has the inputs of one group.
    """
    inputs_per_group = weight.shape[1]
    if input_channels is None or outputs is None:
        call.match(input_channels, None)  # leaves them whole
        call.match(outputs, None)
        return None
    grouped_inputs = input_channels.reshape(groups, inputs_per_group)  # a row for each group
    grouped_outputs = outputs.reshape(groups, -1)
    # Many small groups (depthwise among them) go as wholes; few large ones lose the same places in each.
    if groups >= inputs_per_group:
        first_of_each_group = grouped_inputs[:, :1]
        call.labels.unite(grouped_inputs, first_of_each_group)
        call.labels.unite(grouped_outputs, first_of_each_group)
        # What remains of a group keeps all its inputs.
        call.labels.leave_whole(inputs if inputs is not None else (), "")
        call.note_whole_groups(weight)
        return None
    call.labels.unite(grouped_inputs, grouped_inputs[:1])
    call.labels.unite(grouped_outputs, grouped_outputs[:1])
    call.match(grouped_inputs[0], inputs)
    return inputs


def transposed_convolution(call: FollowedOp) -> Sequence[Families]:
    """Match input channels with the weight's first axis; its second one is the outputs.

    Notes the layer and its work, and matches the bias.  With groups all channels are left whole.
    """
    value, weight = call.inputs[0], call.inputs[1]
    if int(call.value("groups", 1)) != 1:
        call.leave_inputs_whole(f"{call.place} is a transposed convolution with groups")
        return [()]
    inputs = call.labels_along(_channel_families(call, weight, 0), 0)
    outputs = call.labels_along(_channel_families(call, weight, 1), 1)
    channel_axis = 1 - weight.ndim
    call.match(call.labels_along(call.families_of(value), channel_axis), inputs)
    return _note_layer(call, outputs, inputs, channel_axis, ())


def linear(call: FollowedOp) -> Sequence[Families]:
    """Match the input's features with the weight's inputs; note the layer, whose outputs are the op's."""
    value, weight = call.inputs[0], call.inputs[1]
    input_features, other_families = call.split_axis(call.families_of(value), -1)
    outputs = call.labels_along(_channel_families(call, weight, 0), 0)
    inputs = call.labels_along(_channel_families(call, weight, 1), 1)
    call.match(input_features, inputs)
    return _note_layer(call, outputs, inputs, -1, other_families)


def _channel_families(call: FollowedOp, weight: Any, axis: int) -> Families:
    """Return the families of a weight along one axis: outputs or inputs.

    Families along the window of a convolution are no channels, and are left whole.
    """
    families = call.families_of(weight)
    for family in families:
        is_along_window = weight.ndim > 2 and family.shape[:2] == (1, 1)
        if is_along_window:
            call.labels.leave_whole(family, "")
    return tuple(family for family in families if family.shape[axis] > 1)


def _note_layer(
    call: FollowedOp, outputs: Family | None, inputs: Family | None, axis: int, other_families: Families
) -> Sequence[Families]:
    """Note outputs and multiplications of a layer, match its bias, and return the families of its output.

    axis: of the output's channels.  other_families: of the input, along axes that the output has too.
    """
    call.labels.mark_outputs(outputs)
    call.match_vector(outputs, call.value("bias"))
    output, weight = call.outputs[0], call.inputs[1]
    is_transposed = call.type.startswith("conv_transpose")
    # A transposed convolution multiplies each element of its input by the window, others each of their
    # output.
    multiplications = prod((call.inputs[0] if is_transposed else output).shape) * prod(weight.shape[1:])
    call.notes.work.append(Work(multiplications, outputs, inputs))
    return [other_families + shaped(outputs, axis % output.ndim, output.ndim)]


def product(call: FollowedOp) -> Sequence[Families]:
    """Follow a product of matrices, the second of which may be the weight of a layer."""
    return [matrix_product(call, call.part_of(call.inputs[0]), call.part_of(call.inputs[1]), call.inputs[1])]


def matrix_product_plus(call: FollowedOp) -> Sequence[Families]:
    """Follow a product of matrices, to which a third is added."""
    summand, first, second = call.inputs[:3]
    shape = tuple(call.outputs[0].shape)
    product_families = matrix_product(call, call.part_of(first), call.part_of(second), second)
    return [
        call.labels.unite_elementwise([call.part_of(summand), (product_families, shape)], call.lacking_reason)
    ]


def matrix_product(call: FollowedOp, first: Part, second: Part, weight: Any = None) -> Families:
    """Match the channels that are summed over; return those of rows, columns and all before them.

    Channels of vectors are left whole.
    weight: the second tensor; for a parameter, its columns are noted as outputs of a layer, and the work.
    """
    (first_families, first_shape), (second_families, second_shape) = first, second
    if min(len(first_shape), len(second_shape)) < 2:
        call.leave_inputs_whole(f"channels are not followed through {call.place} of a vector")
        return ()
    summed_in_first, row_families = call.split_axis(first_families, -1)
    summed_in_second, column_families = call.split_axis(second_families, -2)
    # The sum is over both: a channel goes from both factors or from none.
    call.match(summed_in_first, summed_in_second)
    if weight is not None and call.name_of(weight) is not None:
        outputs, _ = call.split_axis(column_families, -1)
        call.labels.mark_outputs(outputs)
        multiplications = prod(first_shape[:-1]) * second_shape[0] * second_shape[1]
        call.notes.work.append(Work(multiplications, outputs, summed_in_second))
    # Rows (..., rows, 1) and columns (..., 1, columns) meet in the product as in an elementwise op.
    rows = row_families, (*first_shape[:-1], 1)
    columns = column_families, (*second_shape[:-2], 1, second_shape[-1])
    return call.labels.unite_elementwise([rows, columns], call.lacking_reason)


def batch_norm(call: FollowedOp) -> Sequence[Families]:
    """Match channels with weight, bias and running statistics."""
    channels = call.labels_along(call.families_of(call.inputs[0]), 1)
    vectors = (call.value(name) for name in ("weight", "bias", "running_mean", "running_var"))
    call.match_vector(channels, *vectors)
    return [shaped(channels, 1, call.inputs[0].ndim)]


def layer_norm(call: FollowedOp) -> Sequence[Families]:
    """Match features with weights and biases; a reduction over the kept features is noted.

    Several axes over which the op computes stay whole instead.
    """
    value, extents = call.inputs[0], call.value("normalized_shape")
    families = call.families_of(value)
    # A reduction is noted along one axis: over several ones the kept elements are not a rectangle of channels
    # alone.
    if len(extents) > 1:
        axes = range(value.ndim - len(extents), value.ndim)
        for name in ("weight", "bias"):
            call.labels.leave_whole(call.families_of(call.value(name)), "")
        return [call.labels.pin_axes(families, axes, f"{call.place} computes over several axes")]
    features, other_families = call.split_axis(families, -1)
    call.match_vector(features, call.value("weight"), call.value("bias"))
    if features is not None:
        call.note_reduction(value.ndim - 1, features)
    return [other_families + shaped(features, value.ndim - 1, value.ndim)]


def group_norm(call: FollowedOp) -> Sequence[Families]:
    """Match channels with weights and biases.

    Many small groups are removed as wholes; few large ones lose the same places in each, and a reduction over
    the kept channels is noted.
    """
    value, groups = call.inputs[0], int(call.value("num_groups"))
    channels = call.labels_along(call.families_of(value), 1)
    call.match_vector(channels, call.value("weight"), call.value("bias"))
    if channels is not None:
        grouped = channels.reshape(groups, -1)
        first_of_each_group = grouped[:, :1]  # broadcast over a group
        first_group = grouped[:1]  # broadcast over the groups
        # The same choice as in grouped convolutions, so that both fit where one follows the other.
        if groups >= grouped.shape[1]:
            call.labels.unite(grouped, first_of_each_group)
            call.note_whole_groups(call.value("weight"))
        else:
            call.labels.unite(grouped, first_group)
            # Fewer channels in each group: mean and variance are over these alone, which masks do not give.
            call.note_reduction(1, channels)
    return [shaped(channels, 1, value.ndim)]


def embedding(call: FollowedOp) -> Sequence[Families]:
    """Pass on the features of rows that data select; all rows stay."""
    weight, rank = call.value("weight"), call.outputs[0].ndim
    rows = _channel_families(call, weight, 0)
    # Numbers in the data select rows: without one row all later numbers would be wrong.
    call.labels.leave_whole(rows, f"{call.place} reads them by index")
    outputs = call.labels_along(_channel_families(call, weight, 1), 1)
    call.labels.mark_outputs(outputs)
    return [shaped(outputs, rank - 1, rank)]


def attention(call: FollowedOp) -> Sequence[Families]:
    """Keep the features of a head together, as the scale depends on their number: whole heads are removed.

    Where several queries share a key and value, they go together.
    """
    query, key, value = (call.part_of(tensor) for tensor in call.inputs[:3])  # families and extents of each
    reason = f"{call.place} is scaled by how many there are"
    # The scale is 1 / sqrt(features), which the op computes from the features that it receives.
    query, key = ((call.labels.pin_axes(families, [-1], reason), shape) for families, shape in (query, key))
    _, query_shape = query
    if call.value("enable_gqa"):  # as many heads of keys and values as of queries
        head_count = query_shape[-3]
        key, value = (
            _repeat_heads((families, shape), head_count // shape[-3]) for families, shape in (key, value)
        )
    # The scores are the product of queries and transposed keys: (..., tokens of queries, tokens of keys).
    key_families, (*batch, tokens, features) = key
    transposed_keys = tuple(np.swapaxes(family, -1, -2) for family in key_families)
    scores = matrix_product(call, query, (transposed_keys, (*batch, features, tokens)))
    scores_shape = (*query_shape[:-1], tokens)
    mask = call.value("attn_mask")
    if mask is not None:
        scores = call.labels.unite_elementwise(
            [(scores, scores_shape), call.part_of(mask)], call.lacking_reason
        )
    scores = call.labels.pin_axes(scores, [-1], reason)
    return [matrix_product(call, (scores, scores_shape), value)]


def _repeat_heads(part: Part, times: int) -> Part:
    """Return each head as often as queries share it."""
    families, shape = part
    repeated = tuple(family.repeat(times, -3) if family.shape[-3] > 1 else family for family in families)
    return repeated, (*shape[:-3], shape[-3] * times, *shape[-2:])


Rule = Callable[[FollowedOp], Sequence[Families]]


def elementwise(call: FollowedOp) -> Sequence[Families]:
    """Unite the channels of all tensors, broadcast as by the op; leave all whole if it does not broadcast."""
    parts = [call.part_of(value) for value in call.inputs if hasattr(value, "shape")]
    # The op does not broadcast its inputs, so that its elements are not those of the inputs at the same
    # places.
    if np.broadcast_shapes(*(shape for _, shape in parts)) != tuple(call.outputs[0].shape):
        return unknown(call)
    return [call.labels.unite_elementwise(parts, call.lacking_reason)] * len(call.outputs)


def same_channels(call: FollowedOp) -> Sequence[Families]:
    """Pass channels on along axes that keep their extents; leave others whole."""
    families_by_output = []
    for output in call.outputs:
        output_families: list[Any] = []
        for family in call.families_of(call.inputs[0]):
            extents = zip(family.shape, output.shape, strict=False)
            if family.ndim == output.ndim and all(
                extent in (1, output_extent) for extent, output_extent in extents
            ):
                output_families.append(family)
            else:
                call.labels.leave_whole(family, f"{call.place} changes how many there are")
        families_by_output.append(tuple(output_families))
    return families_by_output


def over_axis(call: FollowedOp) -> Sequence[Families]:
    """Keep the axis whole over which the op computes."""
    rank = len(call.inputs[0].shape)
    axis = call.value("dim", -1)
    families = call.labels.pin_axes(
        call.families_of(call.inputs[0]), [axis % rank], f"{call.place} computes over them"
    )
    return [families] * len(call.outputs)


def reduced(call: FollowedOp) -> Sequence[Families]:
    """Leave channels whole along axes over which the op computes; a mean or sum is noted instead.

    A mean or sum is over the channels that are kept.  Other axes pass on.
    """
    value = call.inputs[0]
    rank, dim = len(value.shape), call.value("dim")
    if dim is None or dim == []:
        dims: Iterable[int] = range(rank)
    else:
        dims = [dim] if isinstance(dim, int) else dim
    axes, families = sorted(axis % rank for axis in dims), call.families_of(value)
    for axis in axes:
        # Over kept channels a mean differs from the mean over masked ones: noted, so that the simulation
        # selects them.
        if call.type in ("mean", "sum"):
            labels, families = call.split_axis(families, axis)
            if labels is not None:
                call.note_reduction(axis, labels)
        families = call.labels.pin_axes(families, [axis], f"{call.place} computes over them")
    if len(call.outputs[0].shape) != rank:
        families = tuple(np.squeeze(family, tuple(axes)) for family in families)
    return [families] * len(call.outputs)


def concatenated(call: FollowedOp) -> Sequence[Families]:
    """Concatenate the labels of tensors along the op's axis; unite those along other axes.

    Places along the axis without channels get labels that stay whole, unless no tensor has channels there.
    """
    # Tensors without elements add no places, and may have another rank.
    tensors = [tensor for tensor in call.inputs[0] if prod(tensor.shape)]
    if not tensors:
        return fresh(call)
    rank = tensors[0].ndim
    axis = call.value("dim", 0) % rank
    parts_of_other_axes: list[Part] = []
    labels_along_axis: list[Any] = []  # of each tensor, None without channels there
    for tensor in tensors:
        families = call.families_of(tensor)
        other_families = tuple(family for family in families if family.shape[axis] == 1)
        axis_families = tuple(family for family in families if family.shape[axis] > 1)
        parts_of_other_axes.append((other_families, (*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])))
        labels_along_axis.append(call.labels_along(axis_families, axis))
    # Along the other axes all tensors have the same channels.
    merged = call.labels.unite_elementwise(parts_of_other_axes, call.lacking_reason)
    if all(labels is None for labels in labels_along_axis):
        return [merged]
    for i, (labels, tensor) in enumerate(zip(labels_along_axis, tensors, strict=True)):
        if labels is None:
            # Places without channels have labels too, or those behind them would move.
            labels_along_axis[i] = call.labels.new_labels(tensor.shape[axis])
            call.labels.leave_whole(labels_along_axis[i], f"{call.place} has channels beside them that stay")
    return [merged + shaped(np.concatenate(labels_along_axis), axis, rank)]


def glu(call: FollowedOp) -> Sequence[Families]:
    """Unite the halves of an axis that the op multiplies."""
    value = call.inputs[0]
    axis = call.value("dim", -1) % value.ndim
    labels, other_families = call.split_axis(call.families_of(value), axis)
    if labels is not None:
        # The op multiplies place i by place i + n / 2.
        labels, second_half = np.split(labels, 2)
        call.labels.unite(labels, second_half)
    return [other_families + shaped(labels, axis, value.ndim)]


def prelu(call: FollowedOp) -> Sequence[Families]:
    """Match channels, along axis 1, with their slopes; one slope for all matches none."""
    value, slopes = call.inputs[:2]
    if prod(slopes.shape) == 1:
        return same_channels(call)
    channels = call.labels_along(call.families_of(value), 1)
    call.match_vector(channels, slopes)
    return [shaped(channels, 1, value.ndim)]


def stacked(call: FollowedOp) -> Sequence[Families]:
    """Unite the channels of tensors that are stacked along a new axis, which has none."""
    axis = call.value("dim", 0) % call.outputs[0].ndim
    families = call.labels.unite_elementwise(
        [call.part_of(tensor) for tensor in call.inputs[0]], call.lacking_reason
    )
    return [tuple(np.expand_dims(family, axis) for family in families)]


def rearranged(call: FollowedOp) -> Sequence[Families]:
    """Move labels as the op moves elements; leave all whole if indices, as of a gather, have channels.

    Families that then vary along several axes are added to the blocks.
    """
    if any(call.families_of(call.value(name)) for name in _INDICES):
        return unknown(call)
    families_by_output: list[list[Any]] = [[] for _ in call.outputs]
    for family in call.families_of(call.inputs[0]):
        for output_families, moved_family in zip(families_by_output, call.move(family), strict=True):
            compressed = call.labels.without_constant_axes(moved_family, call.lacking_reason)
            if compressed is not None:
                output_families.append(compressed)
                # As heads and their features: `settle_blocks` decides later which axis carries the channels.
                if len(varying(compressed)) > 1:
                    call.labels.blocks.append(compressed)
    return [tuple(output_families) for output_families in families_by_output]


def shuffled(call: FollowedOp) -> Sequence[Families]:
    """Move channels between groups, noted as a block, or into images, of each of which all go together."""
    value, groups = call.inputs[0], call.value("groups")
    is_channel_shuffle = bool(groups)
    # An input of pixel_shuffle may lack the axis of a batch.
    channels = call.labels_along(call.families_of(value), 1 if is_channel_shuffle else -3)
    if channels is not None and is_channel_shuffle:
        call.labels.blocks.append(channels.reshape(int(groups), -1))
    elif channels is not None:
        channels_of_image = channels.reshape(-1, int(call.value("upscale_factor")) ** 2)
        call.labels.unite(channels_of_image, channels_of_image[:, :1])
    return rearranged(call)


def unknown(call: FollowedOp) -> Sequence[Families]:
    """Leave the channels of all inputs whole; outputs have none."""
    call.leave_inputs_whole(f"channels are not followed through {call.place}")
    return [()] * len(call.outputs)


def fresh(call: FollowedOp) -> Sequence[Families]:
    """Give outputs no channels, and leave those of the inputs as they are."""
    return [()] * len(call.outputs)


def _by_word(table: dict[str, Rule]) -> dict[str, Rule]:
    """Return rules by a single word, from a table whose keys have several words each."""
    return {word: rule for words, rule in table.items() for word in words.split()}


_INDICES = ("index", "indices", "repeats")
"""Inputs of ops by which data select or repeat elements."""

MOVES = (rearranged, shuffled)
"""The rules of ops that only move elements."""

# A word without a rule leaves its channels whole, so that the table may grow op by op.
RULES: dict[str, Rule] = _by_word({
    " ".join(CONVOLUTIONS): convolution, " ".join(TRANSPOSED_CONVOLUTIONS): transposed_convolution,
    "linear": linear, "matmul": product, "addmm baddbmm": matrix_product_plus,
    "batch_norm instance_norm": batch_norm, "layer_norm rms_norm": layer_norm, "group_norm": group_norm,
    "embedding": embedding, "scaled_dot_product_attention": attention,
    "glu": glu, "prelu": prelu, "cat": concatenated, "stack": stacked,
    "softmax log_softmax cumsum cumprod sort argsort topk": over_axis,
    "mean sum amax amin max min prod var std norm any all argmax argmin logsumexp "
    "linalg_vector_norm": reduced,
    "reshape transpose permute getitem unbind split split_with_sizes chunk tensor_split unsqueeze squeeze "
    "expand expand_as select narrow slice index_select repeat repeat_interleave tile broadcast_to "
    "diagonal flip roll": rearranged, "channel_shuffle pixel_shuffle": shuffled,
    "dropout alpha_dropout feature_dropout clone contiguous to detach data alias type_as zeros_like "
    "ones_like empty_like full_like max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d pad "
    "constant_pad_nd reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d "
    "upsample_bicubic2d interpolate bernoulli bernoulli_ requires_grad": same_channels,
    "shape size dim numel item new_zeros new_ones new_empty new_full": fresh,
    "add sub rsub mul div floor_divide remainder pow neg abs eq ne lt le gt ge clamp where copy exp log sqrt "
    "rsqrt reciprocal square sin cos tanh sigmoid relu relu6 gelu silu elu selu celu leaky_relu hardtanh "
    "hardswish hardsigmoid softplus mish log_sigmoid erf clamp_min clamp_max maximum minimum addcmul "
    "addcdiv lerp masked_fill logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
    "isnan isinf round floor ceil sign threshold": elementwise,
})  # fmt: skip

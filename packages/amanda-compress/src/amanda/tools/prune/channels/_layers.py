"""The rules of ops that read weights, and of attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._labels import Call, Families, Family, Part, Work, shaped


def convolution(call: Call) -> Sequence[Families]:
    """Match input channels with the weight's; the weight's outputs are the op's.

    A grouped convolution loses whole groups, or the same place in each group, of which there are more.
    """
    value, weight, groups = call.inputs[0], call.inputs[1], int(call.value("groups", 1))
    input_channels = call.along(call.of(value), -(weight.ndim - 1))
    outputs = call.along(_axis_of(call, weight, 0), 0)
    inputs = call.along(_axis_of(call, weight, 1), 1)
    if groups == 1:
        call.match(input_channels, inputs)
    else:
        inputs = _match_groups(call, input_channels, outputs, inputs, weight, groups)
    return _outputs_of_layer(call, outputs, inputs, -(weight.ndim - 1), ())


def _match_groups(
    call: Call,
    input_channels: Family | None,
    outputs: Family | None,
    inputs: Family | None,
    weight: Any,
    groups: int,
) -> Family | None:
    """Match the channels of a grouped convolution; return those of the weight's inputs that may go."""
    depth = weight.shape[1]
    if input_channels is None or outputs is None:
        call.match(input_channels, None)
        call.match(outputs, None)
        return None
    input_groups, output_groups = input_channels.reshape(groups, depth), outputs.reshape(groups, -1)
    if groups >= depth:
        call.labels.unite(input_groups, input_groups[:, :1])
        call.labels.unite(output_groups, input_groups[:, :1])
        call.labels.leave(inputs if inputs is not None else (), "")
        call.note_whole_groups(weight)
        return None
    call.labels.unite(input_groups, input_groups[:1])
    call.labels.unite(output_groups, output_groups[:1])
    call.match(input_groups[0], inputs)
    return inputs


def transposed_convolution(call: Call) -> Sequence[Families]:
    """Match input channels with the weight's first axis; its second one is the outputs."""
    value, weight = call.inputs[0], call.inputs[1]
    if int(call.value("groups", 1)) != 1:
        call.leave_all(f"{call.place} is a transposed convolution with groups")
        return [()]
    inputs = call.along(_axis_of(call, weight, 0), 0)
    outputs = call.along(_axis_of(call, weight, 1), 1)
    call.match(call.along(call.of(value), -(weight.ndim - 1)), inputs)
    return _outputs_of_layer(call, outputs, inputs, -(weight.ndim - 1), ())


def linear(call: Call) -> Sequence[Families]:
    """Match the features of the input with the weight's inputs; the weight's outputs are the op's."""
    value, weight = call.inputs[0], call.inputs[1]
    input_features, other_families = call.split(call.of(value), -1)
    outputs = call.along(_axis_of(call, weight, 0), 0)
    inputs = call.along(_axis_of(call, weight, 1), 1)
    call.match(input_features, inputs)
    return _outputs_of_layer(call, outputs, inputs, -1, other_families)


def _axis_of(call: Call, weight: Any, axis: int) -> Families:
    """Return the families of a weight along one axis; those of windows are no channels."""
    families = call.of(weight)
    for family in families:
        if weight.ndim > 2 and max(family.shape[:2]) == 1:
            call.labels.leave(family, "")
    return tuple(family for family in families if family.shape[axis] > 1)


def _outputs_of_layer(
    call: Call, outputs: Family | None, inputs: Family | None, axis: int, other_families: Families
) -> Sequence[Families]:
    call.labels.produce(outputs)
    call.match_vector(outputs, call.value("bias"))
    output, weight = call.outputs[0], call.inputs[1]
    transposed = call.type.startswith("conv_transpose")
    each = prod((call.inputs[0] if transposed else output).shape) * prod(weight.shape[1:])
    call.notes.work.append(Work(each, outputs, inputs))
    return [other_families + shaped(outputs, axis % output.ndim, output.ndim)]


def product(call: Call) -> Sequence[Families]:
    """Multiply matrices."""
    return [matrix_product(call, call.part(call.inputs[0]), call.part(call.inputs[1]), call.inputs[1])]


def matrix_product_plus(call: Call) -> Sequence[Families]:
    """Multiply matrices, and add a third."""
    added, first, second = call.inputs[:3]
    shape = tuple(call.outputs[0].shape)
    product_families = matrix_product(call, call.part(first), call.part(second), second)
    return [call.labels.merged([call.part(added), (product_families, shape)], call.lacking)]


def matrix_product(call: Call, first: Part, second: Part, weight: Any = None) -> Families:
    """Match the channels that are summed over; return those of rows, columns and all before them."""
    (rows, first_shape), (columns, second_shape) = first, second
    if min(len(first_shape), len(second_shape)) < 2:
        call.leave_all(f"channels are not followed through {call.place} of a vector")
        return ()
    summed, rows = call.split(rows, -1)
    read, columns = call.split(columns, -2)
    call.match(summed, read)
    if weight is not None and call.name_of(weight) is not None:
        outputs, _ = call.split(columns, -1)
        call.labels.produce(outputs)
        row_count = prod(first_shape[:-1])
        call.notes.work.append(Work(row_count * second_shape[0] * second_shape[1], outputs, read))
    return call.labels.merged(
        [(rows, (*first_shape[:-1], 1)), (columns, (*second_shape[:-2], 1, second_shape[-1]))], call.lacking
    )


def batch_norm(call: Call) -> Sequence[Families]:
    """Match channels with weight, bias and running statistics."""
    channels = call.along(call.of(call.inputs[0]), 1)
    vectors = (call.value(name) for name in ("weight", "bias", "running_mean", "running_var"))
    call.match_vector(channels, *vectors)
    return [shaped(channels, 1, call.inputs[0].ndim)]


def layer_norm(call: Call) -> Sequence[Families]:
    """Match features with weights and biases; the mean is over the features that are kept."""
    value, extents = call.inputs[0], call.value("normalized_shape")
    families = call.of(value)
    if len(extents) > 1:
        axes = range(value.ndim - len(extents), value.ndim)
        call.labels.leave([family for name in ("weight", "bias") for family in call.of(call.value(name))], "")
        return [call.labels.pinned(families, axes, f"{call.place} computes over several axes")]
    features, other_families = call.split(families, -1)
    call.match_vector(features, call.value("weight"), call.value("bias"))
    if features is not None:
        call.note_reduction(value.ndim - 1, features)
    return [other_families + shaped(features, value.ndim - 1, value.ndim)]


def group_norm(call: Call) -> Sequence[Families]:
    """Match channels with weights and biases; whole groups go, or the same place in each group."""
    value, groups = call.inputs[0], int(call.value("num_groups"))
    channels = call.along(call.of(value), 1)
    call.match_vector(channels, call.value("weight"), call.value("bias"))
    if channels is not None:
        grouped = channels.reshape(groups, -1)
        if groups >= grouped.shape[1]:
            call.labels.unite(grouped, grouped[:, :1])
            call.note_whole_groups(call.value("weight"))
        else:
            call.labels.unite(grouped, grouped[:1])
            call.note_reduction(1, channels)
    return [shaped(channels, 1, value.ndim)]


def embedding(call: Call) -> Sequence[Families]:
    """Pass on the features of rows that data select; all rows stay."""
    weight, rank = call.value("weight"), call.outputs[0].ndim
    rows = _axis_of(call, weight, 0)
    call.labels.leave(rows, f"{call.place} reads them by index")
    outputs = call.along(_axis_of(call, weight, 1), 1)
    call.labels.produce(outputs)
    return [shaped(outputs, rank - 1, rank)]


def attention(call: Call) -> Sequence[Families]:
    """Keep the features of a head together, which the scale is of all of: whole heads are removed.

    Where several queries share a key and value, they go together.
    """
    query, key, value = (call.part(item) for item in call.inputs[:3])
    reason = f"{call.place} is scaled by how many there are"
    query, key = ((call.labels.pinned(item, [-1], reason), shape) for item, shape in (query, key))
    if call.value("enable_gqa"):
        key, value = (_repeated(item, query[1][-3] // item[1][-3]) for item in (key, value))
    shape = (*key[1][:-2], key[1][-1], key[1][-2])
    turned = tuple(np.swapaxes(item, -1, -2) for item in key[0])
    scores = matrix_product(call, query, (turned, shape))
    scored = (*query[1][:-1], shape[-1])
    mask = call.value("attn_mask")
    if mask is not None:
        scores = call.labels.merged([(scores, scored), call.part(mask)], call.lacking)
    scores = call.labels.pinned(scores, [-1], reason)
    return [matrix_product(call, (scores, scored), value)]


def _repeated(part: Part, times: int) -> Part:
    """Return heads as often as queries share each."""
    families, shape = part
    repeated = tuple(family.repeat(times, -3) if family.shape[-3] > 1 else family for family in families)
    return repeated, (*shape[:-3], shape[-3] * times, *shape[-2:])

"""The rules of ops that read weights, and of attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call, Work
from amanda.tools.prune.channels._labels import Families, Family, Part, shaped


def convolution(call: Call) -> Sequence[Families]:
    """Match input channels with the weight's; the weight's outputs are the op's.

    A grouped convolution loses whole groups, or the same place in each group, of which there are more.
    """
    value, weight, groups = call.inputs[0], call.inputs[1], int(call.value("groups", 1))
    given = call.along(call.of(value), -(weight.ndim - 1))
    outputs = call.along(_axis_of(call, weight, 0), 0)
    inputs = call.along(_axis_of(call, weight, 1), 1)
    if groups == 1:
        call.match(given, inputs)
    else:
        inputs = _grouped(call, given, outputs, inputs, weight, groups)
    return _layer(call, outputs, inputs, -(weight.ndim - 1), ())


def _grouped(
    call: Call, given: Family | None, outputs: Family | None, inputs: Family | None, weight: Any, groups: int
) -> Family | None:
    """Match the channels of a grouped convolution; return those of the weight's inputs that may go."""
    depth = weight.shape[1]
    if given is None or outputs is None:
        call.match(given, None)
        call.match(outputs, None)
        return None
    read, made = given.reshape(groups, depth), outputs.reshape(groups, -1)
    if groups >= depth:
        call.labels.unite(read, read[:, :1])
        call.labels.unite(made, read[:, :1])
        call.labels.leave(inputs if inputs is not None else (), "")
        call.note_whole_groups(weight)
        return None
    call.labels.unite(read, read[:1])
    call.labels.unite(made, made[:1])
    call.match(read[0], inputs)
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
    return _layer(call, outputs, inputs, -(weight.ndim - 1), ())


def linear(call: Call) -> Sequence[Families]:
    """Match the features of the input with the weight's inputs; the weight's outputs are the op's."""
    value, weight = call.inputs[0], call.inputs[1]
    given, rest = call.split(call.of(value), -1)
    outputs = call.along(_axis_of(call, weight, 0), 0)
    inputs = call.along(_axis_of(call, weight, 1), 1)
    call.match(given, inputs)
    return _layer(call, outputs, inputs, -1, rest)


def _axis_of(call: Call, weight: Any, axis: int) -> Families:
    """Return the families of a weight along one axis; those of windows are no channels."""
    families = call.of(weight)
    for family in families:
        if weight.ndim > 2 and max(family.shape[:2]) == 1:
            call.labels.leave(family, "")
    return tuple(one for one in families if one.shape[axis] > 1)


def _layer(
    call: Call, outputs: Family | None, inputs: Family | None, axis: int, rest: Families
) -> Sequence[Families]:
    call.labels.produce(outputs)
    call.match_vector(outputs, call.value("bias"))
    made, weight = call.outputs[0], call.inputs[1]
    transposed = call.type.startswith("conv_transpose")
    each = prod((call.inputs[0] if transposed else made).shape) * prod(weight.shape[1:])
    call.notes.work.append(Work(each, outputs, inputs))
    return [rest + shaped(outputs, axis % made.ndim, made.ndim)]


def product(call: Call) -> Sequence[Families]:
    """Multiply matrices."""
    return [matrix_product(call, call.part(call.inputs[0]), call.part(call.inputs[1]), call.inputs[1])]


def matrices_added(call: Call) -> Sequence[Families]:
    """Multiply matrices, and add a third."""
    added, one, other = call.inputs[:3]
    shape = tuple(call.outputs[0].shape)
    made = matrix_product(call, call.part(one), call.part(other), other)
    return [call.labels.merged([call.part(added), (made, shape)], call.lacking)]


def matrix_product(call: Call, one: Part, other: Part, weight: Any = None) -> Families:
    """Match the channels that are summed over; return those of rows, columns and all before them."""
    (left, left_shape), (right, right_shape) = one, other
    if min(len(left_shape), len(right_shape)) < 2:
        call.leave_all(f"channels are not followed through {call.place} of a vector")
        return ()
    summed, left = call.split(left, -1)
    read, right = call.split(right, -2)
    call.match(summed, read)
    if weight is not None and call.name_of(weight) is not None:
        outputs, _ = call.split(right, -1)
        call.labels.produce(outputs)
        rows = prod(left_shape[:-1])
        call.notes.work.append(Work(rows * right_shape[0] * right_shape[1], outputs, read))
    return call.labels.merged(
        [(left, (*left_shape[:-1], 1)), (right, (*right_shape[:-2], 1, right_shape[-1]))], call.lacking
    )


def batch_norm(call: Call) -> Sequence[Families]:
    """Match channels with the averages, weights and biases."""
    own = call.along(call.of(call.inputs[0]), 1)
    vectors = (call.value(name) for name in ("weight", "bias", "running_mean", "running_var"))
    call.match_vector(own, *vectors)
    return [shaped(own, 1, call.inputs[0].ndim)]


def layer_norm(call: Call) -> Sequence[Families]:
    """Match features with weights and biases; the mean is over the features that are kept."""
    value, extents = call.inputs[0], call.value("normalized_shape")
    families = call.of(value)
    if len(extents) > 1:
        axes = range(value.ndim - len(extents), value.ndim)
        call.labels.leave([one for name in ("weight", "bias") for one in call.of(call.value(name))], "")
        return [call.labels.pinned(families, axes, f"{call.place} computes over several axes")]
    own, rest = call.split(families, -1)
    call.match_vector(own, call.value("weight"), call.value("bias"))
    if own is not None:
        call.note_reduction(value.ndim - 1, own)
    return [rest + shaped(own, value.ndim - 1, value.ndim)]


def group_norm(call: Call) -> Sequence[Families]:
    """Match channels with weights and biases; whole groups go, or the same place in each group."""
    value, groups = call.inputs[0], int(call.value("num_groups"))
    own = call.along(call.of(value), 1)
    call.match_vector(own, call.value("weight"), call.value("bias"))
    if own is not None:
        read = own.reshape(groups, -1)
        if groups >= read.shape[1]:
            call.labels.unite(read, read[:, :1])
            call.note_whole_groups(call.value("weight"))
        else:
            call.labels.unite(read, read[:1])
            call.note_reduction(1, own)
    return [shaped(own, 1, value.ndim)]


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
    query, key, value = (call.part(one) for one in call.inputs[:3])
    reason = f"{call.place} is scaled by how many there are"
    query, key = ((call.labels.pinned(one, [-1], reason), shape) for one, shape in (query, key))
    if call.value("enable_gqa"):
        key, value = (_repeated(one, query[1][-3] // one[1][-3]) for one in (key, value))
    shape = (*key[1][:-2], key[1][-1], key[1][-2])
    turned = tuple(np.swapaxes(one, -1, -2) for one in key[0])
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
    made = tuple(one.repeat(times, -3) if one.shape[-3] > 1 else one for one in families)
    return made, (*shape[:-3], shape[-3] * times, *shape[-2:])

"""The rules by an op's word: which channels of its inputs are those of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from amanda.tools.prune.channels._call import Call
from amanda.tools.prune.channels._labels import Families, shaped, varying
from amanda.tools.prune.channels._layers import (
    attention,
    batch_norm,
    convolution,
    embedding,
    group_norm,
    layer_norm,
    linear,
    matrices_added,
    product,
    transposed_convolution,
)

Rule = Callable[[Call], Sequence[Families]]


def elementwise(call: Call) -> Sequence[Families]:
    """Unite the channels of all tensors, broadcast as the op broadcasts them."""
    parts = [call.part(one) for one in call.inputs if hasattr(one, "shape")]
    if np.broadcast_shapes(*(shape for _, shape in parts)) != tuple(call.outputs[0].shape):
        return unknown(call)
    return [call.labels.merged(parts, call.lacking)] * len(call.outputs)


def kept(call: Call) -> Sequence[Families]:
    """Pass channels on along axes that keep their extents."""
    found = []
    for output in call.outputs:
        own: list[Any] = []
        for family in call.of(call.inputs[0]):
            extents = zip(family.shape, output.shape, strict=False)
            if family.ndim == output.ndim and all(mine in (1, theirs) for mine, theirs in extents):
                own.append(family)
            else:
                call.labels.leave(family, f"{call.place} changes how many there are")
        found.append(tuple(own))
    return found


def along_axis(call: Call) -> Sequence[Families]:
    """Keep the axis whole over which the op computes."""
    rank = len(call.inputs[0].shape)
    axis = call.value("dim", -1)
    families = call.labels.pinned(call.of(call.inputs[0]), [axis % rank], f"{call.place} computes over them")
    return [families] * len(call.outputs)


def reduced(call: Call) -> Sequence[Families]:
    """Drop the axes over which the op computes; a mean or sum is over the channels that are kept."""
    value = call.inputs[0]
    rank, given = len(value.shape), call.value("dim")
    axes = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    axes, families = sorted(axis % rank for axis in axes), call.of(value)
    for axis in axes:
        if call.type in ("mean", "sum"):
            own, families = call.split(families, axis)
            if own is not None:
                call.note_reduction(axis, own)
        families = call.labels.pinned(families, [axis], f"{call.place} computes over them")
    if len(call.outputs[0].shape) != rank:
        families = tuple(np.squeeze(one, tuple(axes)) for one in families)
    return [families] * len(call.outputs)


def concatenated(call: Call) -> Sequence[Families]:
    """Put the channels of tensors one after another, or, along another axis, make them the same."""
    values = [one for one in call.inputs[0] if prod(one.shape)]
    if not values:
        return fresh(call)
    rank = values[0].ndim
    axis = call.value("dim", 0) % rank
    parts, runs = [], []
    for value in values:
        families = call.of(value)
        across = tuple(one for one in families if one.shape[axis] == 1)
        along = tuple(one for one in families if one.shape[axis] > 1)
        parts.append((across, (*value.shape[:axis], 1, *value.shape[axis + 1 :])))
        runs.append((call.along(along, axis), value.shape[axis]))
    found = call.labels.merged(parts, call.lacking)
    if any(own is not None for own, _ in runs):
        for i, (own, extent) in enumerate(runs):
            if own is None:
                runs[i] = call.labels.fresh(extent), extent
                call.labels.leave(runs[i][0], f"{call.place} has channels beside them that stay")
        found += shaped(np.concatenate([own for own, _ in runs]), axis, rank)
    return [found]


def gated(call: Call) -> Sequence[Families]:
    """Unite the halves of an axis that the op multiplies."""
    value = call.inputs[0]
    axis = call.value("dim", -1) % value.ndim
    own, rest = call.split(call.of(value), axis)
    if own is not None:
        own, other = np.split(own, 2)
        call.labels.unite(own, other)
    return [rest + shaped(own, axis, value.ndim)]


def with_slopes(call: Call) -> Sequence[Families]:
    """Match channels with slopes, where each has one."""
    value, weight = call.inputs[:2]
    if prod(weight.shape) == 1:
        return kept(call)
    own = call.along(call.of(value), 1)
    call.match_vector(own, weight)
    return [shaped(own, 1, value.ndim)]


def stacked(call: Call) -> Sequence[Families]:
    """Make the channels of tensors the same that are stacked along a new axis."""
    axis = call.value("dim", 0) % call.outputs[0].ndim
    found = call.labels.merged([call.part(one) for one in call.inputs[0]], call.lacking)
    return [tuple(np.expand_dims(one, axis) for one in found)]


def laid_out(call: Call) -> Sequence[Families]:
    """Move labels as the op moves elements."""
    if any(call.of(one) for name, one in zip(call.names, call.inputs, strict=False) if name in _INDICES):
        return unknown(call)
    found: list[list[Any]] = [[] for _ in call.outputs]
    for family in call.of(call.inputs[0]):
        for own, one in zip(found, call.moved(family), strict=True):
            moved = call.labels.compressed(one, call.lacking)
            if moved is not None:
                own.append(moved)
                if len(varying(moved)) > 1:
                    call.labels.blocks.append(moved)
    return [tuple(one) for one in found]


def shuffled(call: Call) -> Sequence[Families]:
    """Move channels between groups, or into images: those that an op takes together go together."""
    value, groups = call.inputs[0], call.value("groups")
    own = call.along(call.of(value), 1 if groups else -3)
    if own is not None and groups:
        call.labels.blocks.append(own.reshape(int(groups), -1))
    elif own is not None:
        read = own.reshape(-1, int(call.value("upscale_factor")) ** 2)
        call.labels.unite(read, read[:, :1])
    return laid_out(call)


def unknown(call: Call) -> Sequence[Families]:
    """Keep the channels of all inputs whole."""
    call.leave_all(f"channels are not followed through {call.place}")
    return [()] * len(call.outputs)


def fresh(call: Call) -> Sequence[Families]:
    """Give outputs no channels, and leave those of the inputs as they are."""
    return [()] * len(call.outputs)


def _by_word(table: dict[str, Rule]) -> dict[str, Rule]:
    return {word: rule for words, rule in table.items() for word in words.split()}


_INDICES = ("index", "indices", "repeats")

MOVES = (laid_out, shuffled)
"""The rules of ops that only move elements."""

RULES: dict[str, Rule] = _by_word({
    " ".join(CONVOLUTIONS): convolution, " ".join(TRANSPOSED_CONVOLUTIONS): transposed_convolution,
    "linear": linear, "matmul": product, "addmm baddbmm": matrices_added,
    "batch_norm instance_norm": batch_norm, "layer_norm rms_norm": layer_norm, "group_norm": group_norm,
    "embedding": embedding, "scaled_dot_product_attention": attention,
    "glu": gated, "prelu": with_slopes, "cat": concatenated, "stack": stacked,
    "softmax log_softmax cumsum cumprod sort argsort topk": along_axis,
    "mean sum amax amin max min prod var std norm any all argmax argmin logsumexp "
    "linalg_vector_norm": reduced,
    "reshape transpose permute getitem unbind split split_with_sizes chunk tensor_split unsqueeze squeeze "
    "expand expand_as select narrow slice index_select repeat repeat_interleave tile broadcast_to "
    "diagonal flip roll": laid_out, "channel_shuffle pixel_shuffle": shuffled,
    "dropout alpha_dropout feature_dropout clone contiguous to detach data alias type_as zeros_like "
    "ones_like empty_like full_like max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d pad "
    "constant_pad_nd reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d "
    "upsample_bicubic2d interpolate bernoulli bernoulli_ requires_grad": kept,
    "shape size dim numel item new_zeros new_ones new_empty new_full": fresh,
    "add sub rsub mul div floor_divide remainder pow neg abs eq ne lt le gt ge clamp where copy exp log sqrt "
    "rsqrt reciprocal square sin cos tanh sigmoid relu relu6 gelu silu elu selu celu leaky_relu hardtanh "
    "hardswish hardsigmoid softplus mish log_sigmoid erf clamp_min clamp_max maximum minimum addcmul "
    "addcdiv lerp masked_fill logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
    "isnan isinf round floor ceil sign threshold": elementwise,
})  # fmt: skip

"""Rules by op: pass factors of channels on, from parameters that compute a tensor to products that read it.

Channels have labels: if the channels of a parameter are divided by factors, so are all tensors with its
labels, until a product whose weight has the same labels and is multiplied by the factors.  To leave labels
means here that their channels get no factors, for a reason; labels that are produced are those of parameters
that could be divided.  A fold is what rules find: weights that multiply one input, and the parameters that
can absorb the factors of the input.  Further words are those of `amanda.tools.prune.channels._labels`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS
from amanda.tools.prune.channels import (
    Families,
    Family,
    FollowedOp,
    ModuleTracing,
    Rule,
    Work,
    concatenated,
    convolution,
    fresh,
    linear,
    same_channels,
    shaped,
    varying,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

UNMADE = "no parameter that could be divided makes its input"
Axis = tuple[int, int]
"""The identity of a parameter, and an axis of it."""


def stop_factors(call: FollowedOp) -> Sequence[Families]:
    """Stop factors at an op: leave its inputs, and mark its outputs with the reason for their readers."""
    # An op without a rule is taken to compute something nonlinear.
    call.leave_inputs_whole(_reads_too(call))
    reason = f"{call.place} makes its input, through which no factor passes"
    return [_families_without_factors(call, output, reason) for output in call.outputs]


def _families_without_factors(call: FollowedOp, output: Any, reason: str) -> Families:
    """Return the families of an output that tell its readers why their input has no factors."""
    label = call.labels.new_labels(1).reshape((1,) * output.ndim)
    call.labels.leave_whole(label, reason)
    # A label of its own, which has a reason and no parameter.
    return (label,)


def _match_input(call: FollowedOp, value: Any, axis: int, weight_inputs: Family | None) -> None:
    """Match the channels of a product's input with those of its weight; without either, leave the other.

    Labels of the input along other axes are left.

    axis: of the input's channels.  weight_inputs: labels of the weight's inputs, None for a weight without.
    """
    families = call.families_of(value)
    along_other_axes = [family for family in families if varying(family) - {axis % value.ndim}]
    call.labels.leave_whole(along_other_axes, _reads_too(call))
    channels = call.labels_along(tuple(family for family in families if family.size > 1), axis)
    if weight_inputs is not None and channels is not None:
        call.labels.unite(channels, weight_inputs)
    elif weight_inputs is not None:
        # The single label of an input without factors has a reason, which then is that of the weight.
        if families:
            single_label = families[0].reshape(-1)[:1]
            call.labels.unite(weight_inputs, single_label)
        call.labels.leave_whole(weight_inputs, UNMADE)
    elif channels is not None:
        call.labels.leave_whole(channels, _reads_too(call))


def _reads_too(call: FollowedOp) -> str:
    """Return the reason of channels that an op reads which no factor passes."""
    return f"{call.place} reads its input too"


def layer(call: FollowedOp) -> Sequence[Families]:
    """Pass the factors of a layer's input on to its weight; return the families of its output.

    Factors stop at convolutions in groups, and at computed weights.
    """
    value, weight = call.inputs[:2]
    # A computed weight cannot be multiplied once and for all.
    if int(call.value("groups", 1)) != 1 or call.name_of(weight) is None:
        return stop_factors(call)
    # In front of the window, from the end, as an input may have no axis of a batch.
    axis = 1 - weight.ndim if call.type != "linear" else -1
    weight_inputs = [family.reshape(-1) for family in call.families_of(weight) if family.shape[1] > 1]
    _match_input(call, value, axis, weight_inputs[0] if weight_inputs else None)
    (output_families,) = (linear if call.type == "linear" else convolution)(call)
    return [tuple(family for family in output_families if family.shape[axis] > 1)]


def product(call: FollowedOp) -> Sequence[Families]:
    """Pass factors on to a parameter on the right; else pass on those of the right factor's columns.

    Otherwise they stop at a bias and at vectors.
    """
    roles = MATRIX_PRODUCTS[call.type]
    value, weight = (call.inputs[position] for position in roles.factors)
    summands = [] if roles.bias is None else [call.inputs[roles.bias]]
    output = call.outputs[0]
    is_parameter = call.name_of(weight) is not None
    if is_parameter and weight.ndim == 2:
        inputs, outputs = _labels_along(call, weight, 0), _labels_along(call, weight, 1)
        _match_input(call, value, -1, inputs)
        call.labels.mark_outputs(outputs)
        call.match_vector(outputs, *summands)
        # `find_folds` reads which inputs are multiplied, not how often.
        call.notes.work.append(Work(multiplications=0, outputs=outputs, inputs=inputs))
        return [shaped(outputs, output.ndim - 1, output.ndim)]
    if summands or min(value.ndim, weight.ndim) < 2:
        return stop_factors(call)
    return _pass_columns(call, call.families_of(weight), [value])


def _labels_along(call: FollowedOp, weight: Any, axis: int) -> Family | None:
    """Return the labels of a matrix along an axis, as a vector; None without any."""
    families = (family for family in call.families_of(weight) if family.shape[axis] > 1)
    return next((family.reshape(-1) for family in families), None)


def attention(call: FollowedOp) -> Sequence[Families]:
    """Pass the factors of values on; whatever else attention reads has none."""
    query, key, value, *masks = call.inputs
    queries_per_key = query.shape[-3] // key.shape[-3] if call.value("enable_gqa") else 1
    families = tuple(
        family.repeat(queries_per_key, -3) if queries_per_key > 1 and family.shape[-3] > 1 else family
        for family in call.families_of(value)
    )
    return _pass_columns(call, families, [query, key, *masks])


def _pass_columns(call: FollowedOp, families: Families, other_tensors: Iterable[Any]) -> Sequence[Families]:
    """Pass on the factors of columns of a tensor, whose rows the op sums; factors of rows stop.

    families: of the tensor.  other_tensors: of the op, which are the weights of the sum, or decide them.
    """
    for tensor in other_tensors:
        call.labels.leave_whole(call.families_of(tensor), _reads_too(call))
    # Rows are summed with weights that differ by column: factors along rows would not come out of the sum.
    column_families = [family for family in families if family.shape[-2] == 1]
    call.labels.leave_whole([family for family in families if family.shape[-2] > 1], _reads_too(call))
    if not column_families:
        return stop_factors(call)
    rank = call.outputs[0].ndim
    return [_with_rank(tuple(column_families), rank)]


def normalization(call: FollowedOp) -> Sequence[Families]:
    """Leave the input of a normalisation, and match its outputs with its weight and bias.

    Without a weight for each channel the outputs have no factors, for a reason.
    """
    call.labels.leave_whole(call.families_of(call.inputs[0]), _reads_too(call))
    weight, output = call.value("weight"), call.outputs[0]
    if weight is None or weight.ndim != 1 or not varies(call.families_of(weight)):
        return [
            _families_without_factors(
                call, output, f"{call.place} makes its input without a weight for each channel"
            )
        ]
    channels = call.labels_along(call.families_of(weight), 0)
    call.match_vector(channels, call.value("bias"))
    axis = output.ndim - 1 if call.type in ("layer_norm", "rms_norm") else 1
    return [shaped(channels, axis, output.ndim)]


def scaling(call: FollowedOp) -> Sequence[Families]:
    """Pass on the factors of one tensor of a quotient or product: a parameter's, else the last one's.

    The other tensor is left.  Factors stop at a divisor.
    """
    tensors = [value for value in call.inputs[:2] if hasattr(value, "shape")]
    candidates = tensors[:1] if call.type == "div" else tensors
    carriers = [tensor for tensor in candidates if varies(call.families_of(tensor))]
    # 1 / x has the inverse factors.
    if not carriers or (call.type == "div" and tensors[0] is not call.inputs[0]):
        return stop_factors(call)
    # A parameter can be divided itself; of two activations, as in a gated unit, the last is the projection.
    parameters = [tensor for tensor in carriers if call.name_of(tensor) is not None]
    carrier = parameters[-1] if parameters else carriers[-1]
    if len(tensors) > 1:
        # The square of a tensor, x * x, has no other one.
        other_tensor = next((tensor for tensor in tensors if tensor is not carrier), carrier)
        call.labels.leave_whole(call.families_of(other_tensor), _reads_too(call))
    return [_with_rank(call.families_of(carrier), call.outputs[0].ndim)]


def addition(call: FollowedOp) -> Sequence[Families]:
    """Make the factors of two added tensors the same; stop unless both vary along the same single axis."""
    # A scalar `alpha` multiplies the second term, and is none.  Names may be fewer than inputs.
    terms = dict(zip(call.names, call.inputs, strict=False))
    terms.pop("alpha", None)
    rank = call.outputs[0].ndim
    term_families = [
        _with_rank(call.families_of(term), rank) for term in terms.values() if hasattr(term, "shape")
    ]
    axes = [[varying(family) for family in families if family.size > 1] for families in term_families]
    if len(term_families) != 2 or any(len(term_axes) != 1 or term_axes != axes[0] for term_axes in axes):
        for families in term_families:
            call.labels.leave_whole(families, f"{call.place} adds something else to its input")
        return stop_factors(call)
    first, second = (next(family for family in families if family.size > 1) for families in term_families)
    call.labels.unite(first, second)
    return [(np.broadcast_arrays(first, second)[0],)]


def mean_or_sum(call: FollowedOp) -> Sequence[Families]:
    """Pass factors on along axes over which the op computes no mean or sum; else, and at integers, stop."""
    # A mean is linear, and a factor of each channel passes through it if channels are not an axis of it.
    value, output, dim = call.inputs[0], call.outputs[0], call.value("dim")
    if dim is None or dim == []:
        axes: Iterable[int] = range(value.ndim)
    else:
        axes = [dim] if isinstance(dim, int) else dim
    passing_families = [
        family for family in call.families_of(value) if all(family.shape[axis] == 1 for axis in axes)
    ]
    if len(passing_families) < len(call.families_of(value)) or not output.is_floating_point():
        return stop_factors(call)
    reduced_axes = tuple(axis % value.ndim for axis in axes) if output.ndim < value.ndim else ()
    return [tuple(np.squeeze(family, reduced_axes) for family in passing_families)]


def rearrangement(call: FollowedOp) -> Sequence[Families]:
    """Move labels as an op moves elements; factors stop where another tensor selects the elements."""
    if any(hasattr(value, "shape") for value in leaves(call.inputs[1:])):
        return stop_factors(call)
    output_families: list[list[Family]] = [[] for _ in call.outputs]
    for family in call.families_of(call.inputs[0]):
        # A single label, of a tensor without factors, is not moved: it only gets the rank of each output.
        is_single = family.size <= 1
        moved_families = [family] * len(output_families) if is_single else call.move(family)
        for families, moved_family, output in zip(output_families, moved_families, call.outputs, strict=True):
            if not is_single:
                # Axes along which factors do not change are dropped.
                moved_family = call.labels.without_constant_axes(moved_family, _reads_too(call))
            if moved_family is None:
                continue
            if moved_family.size <= 1:
                moved_family = moved_family.reshape((1,) * output.ndim)
            families.append(moved_family)
    return [tuple(families) for families in output_families]


def pass_factors(call: FollowedOp) -> Sequence[Families]:
    """Pass factors on through f with f(x / s) = f(x) / s; stop at integers and at pads that are not 0."""
    # A padding of another number than 0 would not be divided.
    pads = call.value("value", 0) if "pad" in call.type else 0
    return same_channels(call) if pads == 0 and call.outputs[0].is_floating_point() else stop_factors(call)


def varies(families: Families) -> bool:
    """Return True if a tensor has channels, which may have factors."""
    return any(family.size > 1 for family in families)


def _with_rank(families: Families, rank: int) -> Families:
    """Return families with leading axes of extent 1 up to a rank."""
    return tuple(family.reshape((1,) * (rank - family.ndim) + family.shape) for family in families)


def _produce_and_follow(rule: Rule, call: FollowedOp) -> Sequence[Families]:
    """Follow an op by a rule, and note the parameters that it reads: their channels can take factors."""
    parameters = [value for value in leaves(call.inputs) if call.name_of(value) is not None]
    for family in (family for parameter in parameters for family in call.families_of(parameter)):
        call.labels.mark_outputs(family)
    return rule(call)


def _by_word(table: dict[str, Callable[[FollowedOp], Sequence[Families]]]) -> dict[str, Rule]:
    """Return rules by a single word, from a table whose keys have several words each."""
    return {
        word: partial(_produce_and_follow, rule) for words, rule in table.items() for word in words.split()
    }


class FactorTracing(ModuleTracing):
    """Follows factors through a call of a module."""

    returned = "the model returns its input"

    def rule(self, type: str) -> Rule:
        """Return the rule for an op's word."""
        return _RULES.get(type, stop_factors)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("linear", *CONVOLUTIONS), layer),
    **dict.fromkeys(("matmul", "addmm"), product),
    **_by_word({
        "layer_norm rms_norm batch_norm instance_norm group_norm": normalization, "mul div": scaling,
        "add sub": addition, "mean sum": mean_or_sum, "cat": concatenated,
        "scaled_dot_product_attention": attention,
        "reshape transpose permute getitem unbind split split_with_sizes chunk tensor_split unsqueeze "
        "squeeze expand expand_as select narrow slice repeat repeat_interleave tile broadcast_to flip":
            rearrangement,
        "relu leaky_relu neg abs dropout feature_dropout clone contiguous to detach data alias "
        "requires_grad max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d pad "
        "constant_pad_nd reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d "
        "upsample_bicubic2d interpolate": pass_factors,
    }),
    **dict.fromkeys((
        "shape size dim numel zeros_like ones_like empty_like full_like "
        "new_zeros new_ones new_empty new_full".split()
    ), fresh),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fold:
    """Weights that multiply one input, and the parameters that compute that input.

    slots: index of the factor of each channel of the input, (channels,); channels that share an element of a
    parameter, such as those of queries that share a value, have the same index.
    readers: the weights that multiply the input, by the axes of their inputs.
    producers: the parameters that compute the input, by the axes of the channels, with the slot of each
    position along the axis, or -1 for a position without a factor.
    names: of all these parameters, by identity.
    """

    slots: NDArray[Any]
    readers: Sequence[Axis]
    producers: Mapping[Axis, NDArray[Any]]
    names: Mapping[int, str]

    def scales(self, factors: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield parameter, axis, and multipliers along the axis.  factors: (channels,)."""
        factors = factors.cpu().double()  # a quotient in float32 would round once more
        for identity, axis in self.readers:
            yield identity, axis, factors
        slot_count = int(self.slots.max()) + 1
        # One element more, which stays 1: the slot -1, of positions without a factor, selects it.
        factor_by_slot = factors.new_ones(slot_count + 1)
        factor_by_slot[self.slots] = factors
        for (identity, axis), slots in self.producers.items():
            yield identity, axis, 1 / factor_by_slot[slots]


def find_folds(
    tracing: FactorTracing, identity_by_name: Mapping[str, int]
) -> tuple[list[Fold], dict[int, str]]:
    """Return the folds of a traced call, and reasons for weights without a fold, by identity.

    A root stands for all channels that have one factor, see `ChannelSets`.
    """
    # A tied parameter has the first of its names: backwards, the first is the last to be set.
    name_by_identity = {identity: name for name, identity in reversed(list(identity_by_name.items()))}
    multiplied_labels = {
        label for work in tracing.notes.work if work.inputs is not None for label in work.inputs.tolist()
    }
    reason_by_root = _reasons_by_root(tracing, multiplied_labels)
    readers, producers = _reading_and_producing_axes(tracing, identity_by_name, multiplied_labels)
    produced_roots = {root for roots in producers.values() for root in roots.tolist()}
    # Weights whose inputs have the same roots multiply one input.
    readers_by_input: dict[tuple[int, ...], list[Axis]] = defaultdict(list)
    for parameter_axis, roots in readers.items():
        readers_by_input[tuple(roots.tolist())].append(parameter_axis)
    input_count_by_root = Counter(root for roots in readers_by_input for root in set(roots))
    folds: list[Fold] = []
    reason_by_unfolded: dict[int, str] = {}
    for input_roots, reader_axes in readers_by_input.items():
        reasons = [reason_by_root[root] for root in input_roots if root in reason_by_root]
        if reasons:
            why = reasons[0]
        elif not produced_roots.issuperset(input_roots):
            why = UNMADE
        elif any(input_count_by_root[root] > 1 for root in input_roots):
            why = "another product reads a part of its input, or more than that"
        else:
            folds.append(_fold_of_input(input_roots, reader_axes, producers, name_by_identity))
            continue
        reason_by_unfolded.update({identity: why for identity, _ in reader_axes})
    return folds, reason_by_unfolded


def _reasons_by_root(tracing: FactorTracing, multiplied_labels: set[int]) -> dict[int, str]:
    """Return why channels cannot have factors, by their root."""
    labels = tracing.notes.labels
    reasons = labels.whole_roots()
    # A weight whose channels are both multiplied and made, as a tied embedding, cannot take both factors.
    contradictory_labels = sorted(multiplied_labels & labels.output_labels())
    for root in labels.roots(np.array(contradictory_labels, int)).tolist():
        reasons.setdefault(root, "another op reads its weight otherwise")
    return reasons


def _reading_and_producing_axes(
    tracing: FactorTracing, identity_by_name: Mapping[str, int], multiplied_labels: set[int]
) -> tuple[dict[Axis, NDArray[Any]], dict[Axis, NDArray[Any]]]:
    """Return the axes of weights along which inputs are multiplied, and all other axes of parameters.

    Both have the roots of the channels along the axis.
    """
    readers: dict[Axis, NDArray[Any]] = {}
    producers: dict[Axis, NDArray[Any]] = {}
    for name, families in tracing.weight_families.items():
        if name not in identity_by_name:  # a buffer
            continue
        for family in families:
            # A family of a parameter varies along one axis.
            axis, channels = int(np.argmax(family.shape)), family.reshape(-1)
            roots_by_axis = readers if int(channels[0]) in multiplied_labels else producers
            roots_by_axis[identity_by_name[name], axis] = tracing.notes.labels.roots(channels)
    return readers, producers


def _fold_of_input(
    input_roots: Sequence[int], reader_axes: Sequence[Axis], producers: Mapping[Axis, NDArray[Any]],
    name_by_identity: Mapping[int, str],
) -> Fold:  # fmt: skip
    """Return the fold of an input with these roots of its channels; slots are in the order of channels."""
    slot_of_root = {root: slot for slot, root in enumerate(dict.fromkeys(input_roots))}
    producer_slots = {
        parameter_axis: np.array([slot_of_root.get(root, -1) for root in roots.tolist()])
        for parameter_axis, roots in producers.items() if not slot_of_root.keys().isdisjoint(roots.tolist())
    }  # fmt: skip
    fold_names = {identity: name_by_identity[identity] for identity, _ in (*reader_axes, *producer_slots)}
    slots = np.array([slot_of_root[root] for root in input_roots])
    return Fold(slots, reader_axes, producer_slots, fold_names)

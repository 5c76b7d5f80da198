"""How factors of channels pass from the parameters that make a tensor to the products that read it.

Labels of channels tell where: a parameter whose channels are divided by factors, so that all tensors with
its labels are divided by them, until a product's weight, whose inputs have the labels, is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS
from amanda.tools.prune.channels.tracing import (
    Call,
    Families,
    Family,
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

UNMADE = "no parameter that could be divided makes its input"


def stopped(call: Call) -> Sequence[Families]:
    """Stop factors at an op: leave its inputs, and mark its outputs with the reason for their readers."""
    call.leave_all(f"{call.place} reads its input too")
    return [_unmade(call, one, f"{call.place} makes its input, through which no factor passes")
            for one in call.outputs]  # fmt: skip


def _unmade(call: Call, output: Any, reason: str) -> Families:
    label = call.labels.fresh(1).reshape((1,) * output.ndim)
    call.labels.leave(label, reason)
    return (label,)


def _read(call: Call, value: Any, axis: int, inputs: Family | None) -> None:
    """Match the channels of a product's input with those of its weight."""
    families = call.of(value)
    others = [one for one in families if varying(one) - {axis % value.ndim}]
    call.labels.leave(others, f"{call.place} reads its input too")
    given = call.along(tuple(one for one in families if one.size > 1), axis)
    if inputs is not None and given is not None:
        call.labels.unite(given, inputs)
    elif inputs is not None and families:
        call.labels.unite(inputs, families[0].reshape(-1)[:1])
    call.labels.leave(inputs if inputs is not None and given is None else (), UNMADE)
    call.labels.leave(
        given if given is not None and inputs is None else (), f"{call.place} reads its input too"
    )


def layer(call: Call) -> Sequence[Families]:
    """Pass the factors of a linear layer's or convolution's input on to its weight; its outputs are made."""
    value, weight = call.inputs[:2]
    if int(call.value("groups", 1)) != 1 or call.name_of(weight) is None:
        return stopped(call)
    axis = 1 - weight.ndim if call.type != "linear" else -1
    inputs = [one.reshape(-1) for one in call.of(weight) if one.shape[1] > 1]
    _read(call, value, axis, inputs[0] if inputs else None)
    made = (linear if call.type == "linear" else convolution)(call)
    return [tuple(one for one in made[0] if one.shape[axis] > 1)]


def product(call: Call) -> Sequence[Families]:
    """Pass factors on to a parameter on the right; a product of other tensors has those of its columns."""
    product = MATRIX_PRODUCTS[call.type]
    value, weight = (call.inputs[position] for position in product.factors)
    added = [] if product.bias is None else [call.inputs[product.bias]]
    output = call.outputs[0]
    if call.name_of(weight) is not None and weight.ndim == 2:
        inputs, outputs = (
            next((one.reshape(-1) for one in call.of(weight) if one.shape[axis] > 1), None) for axis in (0, 1)
        )
        _read(call, value, -1, inputs)
        call.labels.produce(outputs)
        call.match_vector(outputs, *added)
        call.notes.work.append(Work(0, outputs, inputs))
        return [shaped(outputs, output.ndim - 1, output.ndim)]
    if added or min(value.ndim, weight.ndim) < 2:
        return stopped(call)
    return _mixed(call, call.of(weight), [value])


def attention(call: Call) -> Sequence[Families]:
    """Pass the factors of values on; whatever else attention reads has none."""
    query, key, value, *others = call.inputs
    families, times = call.of(value), query.shape[-3] // key.shape[-3] if call.value("enable_gqa") else 1
    families = tuple(one.repeat(times, -3) if times > 1 and one.shape[-3] > 1 else one for one in families)
    return _mixed(call, families, [query, key, *others])


def _mixed(call: Call, families: Families, others: Iterable[Any]) -> Sequence[Families]:
    """Pass on the factors of a tensor whose rows the op adds up, by weights that other tensors are."""
    for one in others:
        call.labels.leave(call.of(one), f"{call.place} reads its input too")
    passed = [one for one in families if one.shape[-2] == 1]
    call.labels.leave([one for one in families if one.shape[-2] > 1], f"{call.place} reads its input too")
    if not passed:
        return stopped(call)
    rank = call.outputs[0].ndim
    return [_ranked(tuple(passed), rank)]


def normalised(call: Call) -> Sequence[Families]:
    """Leave the input of a normalisation, and match its outputs with its weight and bias."""
    call.labels.leave(call.of(call.inputs[0]), f"{call.place} reads its input too")
    weight, output = call.value("weight"), call.outputs[0]
    if weight is None or weight.ndim != 1 or not varies(call.of(weight)):
        return [_unmade(call, output, f"{call.place} makes its input without a weight for each channel")]
    own = call.along(call.of(weight), 0)
    call.match_vector(own, call.value("bias"))
    axis = output.ndim - 1 if call.type in ("layer_norm", "rms_norm") else 1
    return [shaped(own, axis, output.ndim)]


def scaled(call: Call) -> Sequence[Families]:
    """Pass on the factors of one tensor of a quotient or product: a parameter's, else the last one's."""
    tensors = [one for one in call.inputs[:2] if hasattr(one, "shape")]
    carriers = [one for one in tensors[: 1 if call.type == "div" else 2] if varies(call.of(one))]
    if not carriers or (call.type == "div" and tensors[0] is not call.inputs[0]):
        return stopped(call)
    carrier = max(reversed(carriers), key=lambda one: call.name_of(one) is not None)
    if len(tensors) > 1:
        other = next((one for one in tensors if one is not carrier), carrier)
        call.labels.leave(call.of(other), f"{call.place} reads its input too")
    return [_ranked(call.of(carrier), call.outputs[0].ndim)]


def added(call: Call) -> Sequence[Families]:
    """Make the factors of tensors the same that are added; where one has none, the others have none."""
    given = dict(zip(call.names, call.inputs, strict=False))
    given.pop("alpha", None)
    found = [_ranked(call.of(one), call.outputs[0].ndim) for one in given.values() if hasattr(one, "shape")]
    axes = [[varying(one) for one in families if one.size > 1] for families in found]
    if len(found) != 2 or any(len(own) != 1 or own != axes[0] for own in axes):
        for families in found:
            call.labels.leave(families, f"{call.place} adds something else to its input")
        return stopped(call)
    one, other = (next(own for own in families if own.size > 1) for families in found)
    call.labels.unite(one, other)
    return [(np.broadcast_arrays(one, other)[0],)]


def averaged(call: Call) -> Sequence[Families]:
    """Pass factors on along axes over which the op computes no mean or sum."""
    value, output, given = call.inputs[0], call.outputs[0], call.value("dim")
    axes = range(value.ndim) if given is None or given == [] else [given] if isinstance(given, int) else given
    passed = [one for one in call.of(value) if all(one.shape[axis] == 1 for axis in axes)]
    if len(passed) < len(call.of(value)) or not output.is_floating_point():
        return stopped(call)
    dropped = tuple(axis % value.ndim for axis in axes) if output.ndim < value.ndim else ()
    return [tuple(np.squeeze(one, dropped) for one in passed)]


def moved(call: Call) -> Sequence[Families]:
    """Move labels as an op moves elements that no other tensor selects."""
    if any(hasattr(one, "shape") for one in leaves(call.inputs[1:])):
        return stopped(call)
    found: list[list[Family]] = [[] for _ in call.outputs]
    for family in call.of(call.inputs[0]):
        made = call.moved(family) if family.size > 1 else [family] * len(found)
        for own, one, output in zip(found, made, call.outputs, strict=True):
            if family.size > 1:
                one = call.labels.compressed(one, f"{call.place} reads its input too")
            if one is not None:
                own.append(one if one.size > 1 else one.reshape((1,) * output.ndim))
    return [tuple(one) for one in found]


def passed(call: Call) -> Sequence[Families]:
    """Pass factors on through a function f with f(x / s) = f(x) / s; of a type that has fractions."""
    pads = call.value("value", 0) if "pad" in call.type else 0
    return same_channels(call) if pads == 0 and call.outputs[0].is_floating_point() else stopped(call)


def varies(families: Families) -> bool:
    """Return True if a tensor has channels, which may have factors."""
    return any(one.size > 1 for one in families)


def _ranked(families: Families, rank: int) -> Families:
    return tuple(one.reshape((1,) * (rank - one.ndim) + one.shape) for one in families)


def _flowing(rule: Rule, call: Call) -> Sequence[Families]:
    """Follow an op with a rule, and note the parameters whose channels it makes tensors of."""
    for value in leaves(call.inputs):
        for family in call.of(value) if call.name_of(value) is not None else ():
            call.labels.produce(family)
    return rule(call)


def _by_word(table: dict[str, Callable[[Call], Sequence[Families]]]) -> dict[str, Rule]:
    return {word: partial(_flowing, rule) for words, rule in table.items() for word in words.split()}


class FactorTracing(ModuleTracing):
    """Follows factors through a call of a module."""

    returned = "the model returns its input"

    def rule(self, type: str) -> Rule:
        """Return the rule for an op's word."""
        return _RULES.get(type, stopped)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("linear", *CONVOLUTIONS), layer),
    **dict.fromkeys(("matmul", "addmm"), product),
    **_by_word({
        "layer_norm rms_norm batch_norm instance_norm group_norm": normalised, "mul div": scaled,
        "add sub": added, "mean sum": averaged, "cat": concatenated,
        "scaled_dot_product_attention": attention,
        "reshape transpose permute getitem unbind split split_with_sizes chunk tensor_split unsqueeze "
        "squeeze expand expand_as select narrow slice repeat repeat_interleave tile broadcast_to flip":
            moved,
        "relu leaky_relu neg abs dropout feature_dropout clone contiguous to detach data alias "
        "requires_grad max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d pad "
        "constant_pad_nd reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d "
        "upsample_bicubic2d interpolate": passed,
    }),
    **dict.fromkeys((
        "shape size dim numel zeros_like ones_like empty_like full_like "
        "new_zeros new_ones new_empty new_full".split()
    ), fresh),
}  # fmt: skip

"""The cost of tangents: what forward-mode derivatives (`jvp`, `jacfwd`) compute beside an op.

A value is a sum of components: itself, its tangent at each level that differentiates, and tangents of
tangents, which have the levels of both. What is linear in each of its factors makes one product of any
components that have no level in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product as cartesian_product
from math import prod
from typing import Any

from amanda.tools.flops._cost import Cost, OpCost, shape_of, size
from amanda.tools.flops._table import CONTRACTIONS, ELEMENTWISE, MOVES, bytes_of, factors_of_node
from amanda.tools.mapping import PRODUCTS

TANGENT = "tangent"
"""The phase of what forward-mode derivatives compute beside an op."""

Levels = frozenset[int]
BatchesByLevels = Mapping[Levels, Mapping[int, int]]
"""The components of a value, by levels: the sizes of batches, by axis.  The value itself has no level."""

_ATTENTION = "scaled_dot_product_attention"
_LINEAR = re.compile(r"_?fft_.*")
"""Ops that are linear in their one tensor, so that a tangent takes what the op takes."""


def has_tangents(shapes: Any) -> bool:
    """Return True if any value among shapes has a tangent."""
    if getattr(shapes, "tangents", ()):
        return True
    return any(has_tangents(shape) for shape in shapes if isinstance(shape, (list, tuple)))


def tangent_op_cost(context: Any, op_cost: OpCost, shapes: Sequence[Any]) -> OpCost:
    """Compute the cost of the tangents of an op's executions, of all their samples; return a new OpCost.

    context: of the op, or a `ShapedContext`.  op_cost: of the op itself, for one sample.
    shapes: those of the inputs, at a backward op those of inputs, outputs, and both sides of gradients.
    """
    if op_cost.phase == "backward":
        cost = _backward_cost(context, op_cost, shapes)
        values = [context.get_grad_outputs(), context.get_grad_inputs()]
        value_shapes = [shape for side in shapes[2:] for shape in side]
    else:
        cost = _forward_cost(context, op_cost, shapes[0])
        values = [context.get_inputs(), context.get_outputs()]
        value_shapes = shapes[0]
    macs, flops = cost or (None, None)
    # Bytes are those of each tangent, at all of its samples.
    components = _combine_components(map(_tangent_components, value_shapes))
    sample_count = sum(_count_samples([batches]) for levels, batches in components.items() if levels)
    return replace(
        op_cost, phase=TANGENT, calls=0, macs=macs, flops=flops,
        bytes=op_cost.bytes and bytes_of(context, values) * sample_count,
        estimate=op_cost.estimate if cost is None else 0,
    )  # fmt: skip


def _forward_cost(context: Any, op_cost: OpCost, shapes: Sequence[Any]) -> Cost | None:
    """Return the cost of the tangents of an op, by its own cost; None where no rule knows."""
    word, macs = context["type"], op_cost.macs
    components = [_tangent_components(shape) for shape in shapes]
    if op_cost.flops == 0 or word in MOVES:
        return Cost()
    if macs is None or op_cost.flops is None:
        return None
    if word == _ATTENTION:
        return _attention_cost(context, macs, components)
    if word in PRODUCTS:
        positions = PRODUCTS[word].factors
        factors = [components[i] for i in positions] or list(map(_tangent_components, _tensor_shapes(shapes)))
        return Cost.of_macs(macs * _count_products(factors))
    if word in ELEMENTWISE:
        output_shapes = [shape_of(value, context["shape"]) for value in context.get_outputs() or ()]
        output_size = max((size(shape) for shape in output_shapes), default=0)
        sizes = [max(size(shape), output_size) for shape in shapes]
        return Cost(0, sum(n * count for n, count in zip(sizes, _count_tangents(components), strict=True)))
    if _LINEAR.fullmatch(context.get_forward_op_type()):
        return Cost(macs, op_cost.flops).part(sum(_count_tangents(components)))
    return None


def _backward_cost(context: Any, op_cost: OpCost, shapes: Sequence[Any]) -> Cost | None:
    """Return the cost of the tangents of a backward op, by its own cost; None where no rule knows."""
    inputs, _, incoming, outgoing = shapes
    word = context["backward_type"].removesuffix("_backward")
    if op_cost.flops == 0:
        return Cost()
    if op_cost.macs is None:
        return None
    if word in ELEMENTWISE:
        # One operation for each element of a gradient, as for the gradient itself.
        counts = _count_tangents([_tangent_components(shape) for shape in outgoing])
        return Cost(0, sum(size(shape) * count for shape, count in zip(outgoing, counts, strict=True)))
    factors = PRODUCTS[word].factors if word in CONTRACTIONS and word in PRODUCTS else ()
    if len(factors) != 2 or context.get_backward_order() > 1:
        return None
    positions = factors_of_node(context.get_backward_op().__name__) or factors
    gradient = _tangent_components(next(shape for shape in incoming if shape is not None))
    # The gradient of a factor is the product of the incoming gradient and the other factor.
    other_factors = [
        _tangent_components(inputs[other_position])
        for position, other_position in zip(positions, reversed(factors), strict=True)
        if position < len(outgoing) and outgoing[position] is not None
    ]
    macs = op_cost.macs // max(len(other_factors), 1)
    return Cost.of_macs(macs * sum(_count_products([gradient, factor]) for factor in other_factors))


def _attention_cost(context: Any, macs: int, components: Sequence[BatchesByLevels]) -> Cost:
    """Return the cost of the tangents of attention: of its scores, of their softmax, and of the result."""
    query, value = (context["shape"](context.get_inputs()[i]) for i in (0, 2))
    query_width, value_width = query[-1], value[-1]
    # The scores are a product of queries and keys, the result one of their softmax and the values.
    score_macs = macs * query_width // (query_width + value_width)
    weights = _combine_components(components[:2])
    macs_of_tangents = score_macs * _count_products(components[:2])
    macs_of_tangents += (macs - score_macs) * _count_products([weights, components[2]])
    return Cost.of_macs(macs_of_tangents, score_macs // query_width * sum(_count_tangents([weights])))


def _tangent_components(shape: Any) -> BatchesByLevels:
    """Return the components of a value, which its shape names; of a list those of all values."""
    if isinstance(shape, (list, tuple)) and not hasattr(shape, "tangents"):
        return _combine_components([_tangent_components(item) for item in shape if isinstance(item, tuple)])
    tangents = {frozenset(levels): dict(batches) for levels, batches in getattr(shape, "tangents", ())}
    return {frozenset(): dict(getattr(shape, "batches", ())), **tangents}


def _combine_components(values: Iterable[BatchesByLevels]) -> BatchesByLevels:
    """Return the components of a product of values: all products of theirs that share no level."""
    combined: dict[Levels, dict[int, int]] = {frozenset(): {}}
    for value in values:
        pairs = cartesian_product(list(combined.items()), value.items())
        for (levels, batches), (other_levels, other_batches) in pairs:
            if not levels & other_levels:
                merged_batches = combined.setdefault(levels | other_levels, {})
                merged_batches.update({**batches, **other_batches})
    return combined


def _count_products(factors: Sequence[BatchesByLevels]) -> int:
    """Return how many products, times their samples, give the tangents of a product of factors."""
    total = 0
    for chosen_components in cartesian_product(*(factor.items() for factor in factors)):
        levels = [level for component_levels, _ in chosen_components for level in component_levels]
        # One factor at least is a tangent, and no level comes twice.
        if levels and len(levels) == len(set(levels)):
            total += _count_samples(batches for _, batches in chosen_components)
    return total


def _count_tangents(values: Sequence[BatchesByLevels]) -> list[int]:
    """Return how many tangents, times their samples, each value has beside the other values themselves."""
    counts = []
    for i, value in enumerate(values):
        batches_of_others = [values[j].get(frozenset(), {}) for j in range(len(values)) if j != i]
        tangents = [batches for levels, batches in value.items() if levels]
        counts.append(sum(_count_samples([batches, *batches_of_others]) for batches in tangents))
    return counts


def _count_samples(batches: Iterable[Mapping[int, int]]) -> int:
    """Return the number of samples of values with these batches together."""
    return prod({axis: size for sizes in batches for axis, size in sizes.items()}.values())


def _tensor_shapes(shapes: Sequence[Any]) -> Iterator[Any]:
    """Yield the shapes of the tensors among inputs, also of those in lists."""
    for shape in shapes:
        if isinstance(shape, tuple) and all(isinstance(item, tuple) for item in shape) and shape:
            yield from shape
        elif isinstance(shape, tuple):
            yield shape

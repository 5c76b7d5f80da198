"""The cost of tangents: what forward-mode derivatives (`jvp`, `jacfwd`) compute beside an op.

A value is a sum of components: itself, its tangent at each level that differentiates, and tangents of
tangents, which have the levels of both. What is linear in each of its factors makes one product of any
components that have no level in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product as combinations
from math import prod
from typing import Any

from amanda.tools.flops._cost import Cost, OpCost, shape_of, size
from amanda.tools.flops._table import CONTRACTIONS, ELEMENTWISE, MOVES, bytes_of, factors_of_node
from amanda.tools.mapping import PRODUCTS

TANGENT = "tangent"
"""The phase of what forward-mode derivatives compute beside an op."""

Levels = frozenset[int]
Components = Mapping[Levels, Mapping[int, int]]
"""The sizes of the batches of each component by their levels; the value itself is under no level."""

_ATTENTION = "scaled_dot_product_attention"
_LINEAR = re.compile(r"_?fft_.*")
"""Ops that are linear in their one tensor, so that a tangent takes what the op takes."""


def has_tangents(shapes: Any) -> bool:
    """Return True if any value among shapes has a tangent."""
    if getattr(shapes, "tangents", ()):
        return True
    return isinstance(shapes, (list, tuple)) and any(map(has_tangents, shapes))


def tangent_place(context: Any, place: OpCost, shapes: Sequence[Any]) -> OpCost:
    """Return the place that counts the tangents of executions; its cost is of all their samples.

    context: of the op, or a `ShapedContext`.  place: of the op, its cost that of one sample.
    shapes: those of the inputs, at a backward op those of inputs, outputs, and both sides of gradients.
    """
    is_backward = place.phase == "backward"
    inputs = [_components(shape) for shape in shapes[0]]
    cost = _backward_cost(context, place, shapes) if is_backward else _forward_cost(context, place, shapes[0])
    macs, flops = cost or (None, None)
    if is_backward:
        values = [context.get_grad_outputs(), context.get_grad_inputs()]
    else:
        values = [context.get_inputs(), context.get_outputs()]
    sides = [_components(shape) for side in shapes[2:] for shape in side] if is_backward else inputs
    count = sum(_samples([batches]) for levels, batches in _combined_components(sides).items() if levels)
    return replace(
        place, phase=TANGENT, calls=0, macs=macs, flops=flops,
        bytes=place.bytes and bytes_of(context, values) * count,
        estimate=place.estimate if cost is None else 0,
    )  # fmt: skip


def _forward_cost(context: Any, place: OpCost, shapes: Sequence[Any]) -> Cost | None:
    """Return the cost of the tangents of an op; None where no formula knows."""
    word, macs = context["type"], place.macs
    components = [_components(shape) for shape in shapes]
    if place.flops == 0 or word in MOVES:
        return Cost()
    if macs is None or place.flops is None:
        return None
    if word == _ATTENTION:
        return _attention_cost(context, macs, components)
    if word in PRODUCTS:
        positions = PRODUCTS[word].factors
        factors = [components[i] for i in positions] or [_components(shape) for shape in _tensors(shapes)]
        return Cost.of_macs(macs * _product_count(factors))
    if word in ELEMENTWISE:
        extents = [shape_of(value, context["shape"]) for value in context.get_outputs() or ()]
        visited = max((size(shape) for shape in extents), default=0)
        sizes = [max(size(shape), visited) for shape in shapes]
        return Cost(0, sum(n * count for n, count in zip(sizes, _tangent_counts(components), strict=True)))
    if _LINEAR.fullmatch(context.get_forward_op_type()):
        return Cost(macs, place.flops).part(sum(_tangent_counts(components)))
    return None


def _backward_cost(context: Any, place: OpCost, shapes: Sequence[Any]) -> Cost | None:
    """Return the cost of the tangents of a backward op; None where no formula knows."""
    inputs, _, incoming, outgoing = shapes
    word = context["backward_type"].removesuffix("_backward")
    if place.flops == 0:
        return Cost()
    if place.macs is None:
        return None
    if word in ELEMENTWISE:
        # One operation for each element of a gradient, as for the gradient itself.
        counts = _tangent_counts([_components(shape) for shape in outgoing])
        return Cost(0, sum(size(shape) * count for shape, count in zip(outgoing, counts, strict=True)))
    factors = PRODUCTS[word].factors if word in CONTRACTIONS and word in PRODUCTS else ()
    if len(factors) != 2 or context.get_backward_order() > 1:
        return None
    positions = factors_of_node(context.get_backward_op().__name__) or factors
    gradient = _components(next(shape for shape in incoming if shape is not None))
    # The gradient of a factor is the product of the incoming gradient and the other factor.
    other_factors = [
        _components(inputs[other_position])
        for position, other_position in zip(positions, reversed(factors), strict=True)
        if position < len(outgoing) and outgoing[position] is not None
    ]
    macs = place.macs // max(len(other_factors), 1)
    return Cost.of_macs(macs * sum(_product_count([gradient, factor]) for factor in other_factors))


def _attention_cost(context: Any, macs: int, components: Sequence[Components]) -> Cost:
    """Return the cost of the tangents of attention: of its scores, of their softmax, and of the result."""
    query, value = (context["shape"](context.get_inputs()[i]) for i in (0, 2))
    depth, width = query[-1], value[-1]
    score_macs = macs * depth // (depth + width)
    weights = _combined_components(components[:2])
    products = score_macs * _product_count(components[:2])
    products += (macs - score_macs) * _product_count([weights, components[2]])
    return Cost.of_macs(products, score_macs // depth * sum(_tangent_counts([weights])))


def _components(shape: Any) -> Components:
    """Return the components of a value, or of all values of a list."""
    if isinstance(shape, (list, tuple)) and not hasattr(shape, "tangents"):
        return _combined_components([_components(item) for item in shape if isinstance(item, tuple)])
    tangents = {frozenset(levels): dict(batches) for levels, batches in getattr(shape, "tangents", ())}
    return {frozenset(): dict(getattr(shape, "batches", ())), **tangents}


def _combined_components(factors: Iterable[Components]) -> Components:
    """Return the components of a function of some values."""
    result: dict[Levels, dict[int, int]] = {frozenset(): {}}
    for factor in factors:
        for (levels, batches), (others, other_batches) in combinations(list(result.items()), factor.items()):
            if not levels & others:
                merged = result.setdefault(levels | others, {})
                merged.update({**batches, **other_batches})
    return result


def _product_count(factors: Sequence[Components]) -> int:
    """Return how many products the tangents take, each times its samples."""
    total = 0
    for components in combinations(*(factor.items() for factor in factors)):
        levels = [level for component, _ in components for level in component]
        if levels and len(levels) == len(set(levels)):
            total += _samples(batches for _, batches in components)
    return total


def _tangent_counts(values: Sequence[Components]) -> list[int]:
    """Return how many tangents each value has, each times its samples."""
    counts = []
    for i, value in enumerate(values):
        rest_batches = [values[j].get(frozenset(), {}) for j in range(len(values)) if j != i]
        counts.append(sum(_samples([batches, *rest_batches]) for levels, batches in value.items() if levels))
    return counts


def _samples(batches: Iterable[Mapping[int, int]]) -> int:
    """Return the number of samples of values with these batches together."""
    return prod({axis: size for sizes in batches for axis, size in sizes.items()}.values())


def _tensors(shapes: Sequence[Any]) -> Iterator[Any]:
    """Yield the shapes of the tensors among inputs, also of those in lists."""
    for shape in shapes:
        if isinstance(shape, tuple) and all(isinstance(item, tuple) for item in shape) and shape:
            yield from shape
        elif isinstance(shape, tuple):
            yield shape

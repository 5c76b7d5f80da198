"""The parameters that an op reads, each with the number of its elements, and the op's name in reports."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import SEVERAL_WEIGHTS
from amanda.tools.weights._parameters import parameter_store


def element_counts(context: amanda.OpContext) -> Iterator[tuple[Hashable, int]]:
    """Yield holder and number of elements of each weight that an op reads; nothing for computed weights."""
    try:
        inputs = context.get_inputs()
    except AmandaError:  # the values of its first execution are gone
        return
    weight = context["weight_index"]
    several = context["type"] in SEVERAL_WEIGHTS or context["type"] == "einsum"
    positions = range(len(inputs)) if several else [weight]
    for position in positions:
        if position is None or position >= len(inputs):
            continue
        value = inputs[position]
        if isinstance(value, (list, tuple)):
            holders = [parameter_store(tensor).owner(tensor) for tensor in value]
        else:
            holders = [context.get_variable(position)]
        for holder in holders:
            size = None if holder is None else _element_count(context, holder, value)
            if size is not None:
                yield parameter_store(holder).identity(holder), size


def einsum_parameters(context: amanda.OpContext) -> list[Any]:
    """Return the parameters that an einsum of PyTorch reads, whole or in part."""
    lists = [operand for operand in context.get_inputs() if isinstance(operand, (list, tuple))]
    owners = [parameter_store(operand).owner(operand) for group in lists for operand in group]
    return [operand for operand in owners if operand is not None]


def _element_count(context: amanda.OpContext, holder: Any, value: Any) -> int | None:
    """Return the number of elements of a holder, or of the value where the holder is a handle."""
    for candidate in (holder, value):
        extents: Sequence[int] | None = (
            None if isinstance(candidate, (list, tuple)) else context["shape"](candidate)
        )
        if extents and None not in extents:
            return prod(extents)
    return None


def describe_op(context: amanda.OpContext) -> str:
    """Return the type of an op and its module, or the line that calls it outside of modules."""
    return f"{context['type']} of {context.get_scope() or context.get_source()}"

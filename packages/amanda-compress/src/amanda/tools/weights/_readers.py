"""Ops that read weights: their names, the parameters that they read, and why a value is no weight."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import SEVERAL_WEIGHTS
from amanda.tools.weights._parameters import parameter_store


def why_unsupported(context: amanda.OpContext, value: Any) -> str | None:
    """Return why a value cannot be a weight of the tool; None if it can."""
    extents = context["shape"](value)
    if extents is None or None in extents or len(extents) < 2:
        return f"its shape is {extents}"
    if 0 in extents:
        return "it has no elements"
    if not str(context["dtype"](value)).startswith(("float", "bfloat")):
        return f"its type is {context['dtype'](value)}"
    if context.is_static() and not _is_in_file(context, context["weight_index"]):
        return "it is computed when the model runs"
    return None


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Return True if an input of an op of a file is a constant."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except AmandaError:
        return False


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
    return f"{context['type']} of {context.get_scope() or context.get_source()}"


def is_adapter(context: amanda.OpContext) -> bool:
    """Return True if the op is one of a LoRA adapter of peft, which is trained beside the model's weights."""
    return any(part.startswith("lora_") for path in context.get_scopes() for part in path.split("."))

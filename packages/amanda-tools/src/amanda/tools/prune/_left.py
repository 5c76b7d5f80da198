"""How much of what was selected is left as it is."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import SEVERAL_WEIGHTS, backend_of, holder_of
from amanda.tools.prune._framework import framework_of


def elements_left(context: amanda.OpContext) -> Iterator[tuple[Hashable, int]]:
    """Numbers of elements of the weights that an op reads, by what holds them; nothing of computed ones."""
    try:
        inputs = context.get_inputs()
    except AmandaError:  # the values of its first execution are gone
        return
    weight = context["weight_index"]
    positions = range(len(inputs)) if context["type"] in SEVERAL_WEIGHTS else [weight]
    for position in positions:
        if position is None or position >= len(inputs):
            continue
        value = inputs[position]
        if isinstance(value, (list, tuple)):
            holders = [holder_of(one) for one in value if backend_of(one) == "torch"]
        else:
            holders = [context.get_variable(position)]
        for holder in holders:
            size = None if holder is None else _size(context, holder, value)
            if size is not None:
                yield framework_of(holder).identity(holder), size


def _size(context: amanda.OpContext, holder: Any, value: Any) -> int | None:
    """Elements of what holds a weight, or else of the weight, as where that is a handle."""
    for one in (holder, value):
        extents: Sequence[int] | None = None if isinstance(one, (list, tuple)) else context["shape"](one)
        if extents and None not in extents:
            return prod(extents)
    return None

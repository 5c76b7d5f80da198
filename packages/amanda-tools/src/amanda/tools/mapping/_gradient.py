"""Which gradient that leaves a backward op is the weight's, in each pass anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda import OpContext
from amanda.errors import AmandaError


def weight_gradient(context: OpContext) -> Callable[[int, Any], bool]:
    """A function that says whether a gradient at a position, as a pass has made it, is that of the weight.

    For the routines of a backward op, which the analysis of one pass inserts for all: another may make no
    gradient of the weight, or, where the weight is broadcast, one of another shape.  A weight that is
    computed anew for each call is told by its rank.  Call it in a callback without `require_outputs`: in one
    with it `weight_grad_index` is that of the present pass alone.
    """
    index, weight, shape = context["weight_grad_index"], context["weight_index"], context["shape"]
    if index is None or weight is None:
        return _never
    try:
        extents = shape(context.get_inputs()[weight])
        held = context.get_variable(weight) is not None
    except AmandaError:
        extents, held = None, False

    def is_weights(position: int, gradient: Any) -> bool:
        made = None if position != index or gradient is None else shape(gradient)
        return made is not None and (extents is None or _agree(made, extents, held))

    return is_weights


def _never(position: int, gradient: Any) -> bool:
    return False


def _agree(one: Sequence[int | None], other: Sequence[int | None], whole: bool) -> bool:
    if len(one) != len(other):
        return False
    return not whole or all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))

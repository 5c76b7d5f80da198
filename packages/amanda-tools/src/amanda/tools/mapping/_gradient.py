"""The weight's gradient among those that leave a backward op, found in each pass anew."""

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
    index, shape = context["weight_grad_index"], context["shape"]
    if index is None:
        return _never
    extents, held = _of_weight(context)

    def is_weights(position: int, gradient: Any) -> bool:
        made = None if position != index or gradient is None else shape(gradient)
        return made is not None and (extents is None or _agree(made, extents, held))

    return is_weights


def drop_unmade(context: OpContext) -> None:
    """Leave `weight_grad_index`, where gradients are known, if this pass made that in the weight's shape."""
    index, grads = context.get("weight_grad_index"), context.get_grad_inputs()
    if index is None or grads is None:
        return
    gradient = grads[index] if index < len(grads) else None
    made, (extents, _) = context["shape"](gradient), _of_weight(context)
    if gradient is None or not (made is None or extents is None or _agree(made, extents, True)):
        context["weight_grad_index"] = None


def _of_weight(context: OpContext) -> tuple[Sequence[int | None] | None, bool]:
    """Extents of the weight, None where they are not known; and whether it keeps them from call to call."""
    weight = context["weight_index"]
    if weight is None:
        return None, False
    try:
        extents = context["shape"](context.get_inputs()[weight])
        return extents, context.get_variable(weight) is not None
    except AmandaError:
        return None, False


def _never(position: int, gradient: Any) -> bool:
    return False


def _agree(one: Sequence[int | None], other: Sequence[int | None], whole: bool) -> bool:
    if len(one) != len(other):
        return False
    return not whole or all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))

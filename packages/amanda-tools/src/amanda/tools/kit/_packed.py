"""Inputs that no tool reads: quantised tensors whose elements are packed into others."""

from __future__ import annotations

from collections.abc import Iterator

import amanda


def packed_inputs(context: amanda.OpContext) -> Iterator[str]:
    """Yield a sentence for a result on each input of an op that is packed into other tensors.

    Call it in a forward analysis routine of a tool that depends on StandardMapping, whose `dtype` names the
    class of such a tensor.
    """
    for position, value in enumerate(context.get_inputs()):
        name = None if isinstance(value, (list, tuple)) else context["dtype"](value)
        if name is not None and name.endswith("]"):
            where = context.get_scope() or context.get_source()
            yield f"Input {position} of {context['type']} of {where} is not read: it is packed, {name}."

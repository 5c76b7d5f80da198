"""Inputs of an op: those that are parameters, and those that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator

import amanda
from amanda.tools.kit._tensors import tensors_of


def parameter_inputs(context: amanda.OpContext) -> tuple[int, ...]:
    """Return the positions of inputs that are parameters or views of one, or were read from a variable."""
    variables = {
        i: context.get_variable(i)
        for i, value in enumerate(context.get_inputs())
        if not isinstance(value, (list, tuple))
    }
    return tuple(i for i, one in variables.items() if one is not None and tensors_of(one).is_parameter(one))


def remarks_on_packed_inputs(context: amanda.OpContext) -> Iterator[str]:
    """Yield a sentence for a result on each input of an op that is packed into other tensors.

    Call it in a forward analysis routine of a tool that depends on StandardMapping, whose `dtype` names the
    class of such a tensor.
    """
    for position, value in enumerate(context.get_inputs()):
        name = None if isinstance(value, (list, tuple)) else context["dtype"](value)
        if name is not None and name.endswith("]") and hasattr(type(value), "__tensor_flatten__"):
            where = context.get_scope() or context.get_source()
            yield unread_sentence(f"Input {position}", f"it is packed, {name}", context["type"], where)


def unread_sentence(what: str, reason: str, kind: str, where: str) -> str:
    """Return a sentence for a result on a tensor that is not read."""
    return f"{what} of {kind} of {where} is not read: {reason}."

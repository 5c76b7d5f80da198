"""Tensors that tools do not read: packed into others, or kept by their class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import amanda

if TYPE_CHECKING:
    from amanda.tools.kit._tensor_tool import OpTensor


def packed_inputs(context: amanda.OpContext) -> Iterator[str]:
    """Yield a sentence for a result on each input of an op that is packed into other tensors.

    Call it in a forward analysis routine of a tool that depends on StandardMapping, whose `dtype` names the
    class of such a tensor.
    """
    for position, value in enumerate(context.get_inputs()):
        name = None if isinstance(value, (list, tuple)) else context["dtype"](value)
        if name is not None and name.endswith("]") and hasattr(type(value), "__tensor_flatten__"):
            where = context.get_scope() or context.get_source()
            yield _sentence(f"Input {position}", f"it is packed, {name}", context["type"], where)


def unread_tensor(tensor: OpTensor, reason: str, kind: str, where: str) -> str:
    """Return a sentence for a result on a tensor of an op that cannot be read.

    kind: the op's type.  where: its module, or the line that calls it.
    """
    role = "input" if tensor.role in ("", "weight") else tensor.role
    return _sentence(f"{role.capitalize()} {tensor.position}", reason, kind, where)


def _sentence(what: str, reason: str, kind: str, where: str) -> str:
    return f"{what} of {kind} of {where} is not read: {reason}."

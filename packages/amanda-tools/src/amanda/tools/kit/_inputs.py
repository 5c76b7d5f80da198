"""Inputs of an op: the values in nested lists, those that are parameters, and those that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import amanda
from amanda.tools.kit._tensors import tensors_of


def leaves(values: Iterable[Any], structures: bool = False) -> list[Any]:
    """Return values, and for each list or tuple among them its leaves.

    structures: True for the leaves of mappings and dataclasses too, such as models return.

    >>> leaves([1, [2, (3,)], "four"])
    [1, 2, 3, 'four']
    """
    flat: list[Any] = []  # a generator takes three times as long
    for value in values:
        nested = _members(value) if structures else value
        if isinstance(nested, (list, tuple)):
            flat += leaves(nested, structures)
        else:
            flat.append(nested)
    return flat


def _members(value: Any) -> Any:
    """Return the values of a mapping or of a dataclass's fields as a list; any other value as it is."""
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return value


def parameter_inputs(context: amanda.OpContext) -> tuple[int, ...]:
    """Return the positions of inputs that are parameters or views of one, or were read from a variable."""
    variables = {
        i: context.get_variable(i)
        for i, value in enumerate(context.get_inputs())
        if not isinstance(value, (list, tuple))
    }
    owned = {i: x for i, x in variables.items() if x is not None}
    return tuple(i for i, x in owned.items() if tensors_of(x).is_parameter(x))


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


def unread_sentence(role: str, reason: str, kind: str, where: str) -> str:
    """Return a sentence for a result on a tensor that is not read."""
    return f"{role} of {kind} of {where} is not read: {reason}."

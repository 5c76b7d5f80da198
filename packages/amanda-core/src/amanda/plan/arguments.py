"""Choose the inputs that a replacement is called with; explain why a routine cannot take its arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import RoutineError

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine


class Parameters:
    """Parameters of a routine that the op's inputs may fill.

    positional: names of those that a position fills.  named: names of those that only a keyword fills.
    variadic, any_name: whether it takes any number of positions, and any keyword.
    """

    __slots__ = ("any_name", "named", "positional", "variadic")

    def __init__(self, routine: Routine, taken: Iterable[str]) -> None:
        parameters = inspect.signature(routine).parameters.values()
        others = [one for one in parameters if one.name not in set(taken)]
        self.positional = [
            one.name for one in others if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        self.named = frozenset(one.name for one in others if one.kind is one.KEYWORD_ONLY)
        self.variadic = any(one.kind is one.VAR_POSITIONAL for one in others)
        self.any_name = any(one.kind is one.VAR_KEYWORD for one in others)


def parameters_of(routine: Routine, taken: Iterable[str]) -> Parameters | None:
    """Return the parameters of a routine, but for those that are taken; None of one written in C."""
    try:
        return Parameters(routine, taken)
    except (TypeError, ValueError):
        return None


def arguments(
    parameters: Parameters | None,
    inputs: Sequence[Any],
    names: Sequence[str],
    holds_tensors: Callable[[Any], bool],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a replacement, by position and by name.

    A replacement is given the op's tensors in order, and other inputs by name where it has a parameter of
    that name. If it has as many parameters as the op has inputs, or any number, it is given all in order.
    """
    if parameters is None:
        return [value for value in inputs if holds_tensors(value)], {}
    if parameters.variadic or len(parameters.positional) >= len(inputs):
        named = {name: value for name, value in zip(names, inputs, strict=False) if name in parameters.named}
        return [value for value, name in _named(inputs, names) if name not in named], named
    known = {*parameters.positional, *parameters.named}
    by_name = {
        name: value
        for value, name in _named(inputs, names)
        if name and not holds_tensors(value) and (name in known or parameters.any_name)
    }
    rest = [value for value, name in _named(inputs, names) if name not in by_name]
    tensors = [value for value in rest if holds_tensors(value)]
    room = sum(name not in by_name for name in parameters.positional)
    first = rest[:room]
    all_tensors = sum(map(holds_tensors, first)) == len(tensors)
    return (first if len(tensors) < room and all_tensors else tensors), by_name


def refused(
    action: Action,
    inputs: Sequence[Any],
    names: Sequence[str],
    given: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RoutineError | None:
    """Return the error for a routine whose signature cannot take its arguments; None if it can.

    inputs, names: what could have been selected.
    """
    taken = {name: None for name in ("run", "shapes") if getattr(action, f"takes_{name}")}
    try:
        inspect.signature(action.func).bind(*given, **{**taken, **action.kwargs, **kwargs})
    except TypeError as error:
        there = ", ".join(f"{i}: {name or '?'} ({_kind(value)})" for i, (value, name) in
                          enumerate(_named(inputs, names)))  # fmt: skip
        word = "outputs" if action.type.is_after else "inputs"
        word = f"grad_{word}" if action.type.is_backward else word
        what = f"{action} cannot be called with {_values(len(given))}: {error}. "
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is not None:
            return RoutineError(
                f"{what}Give the routine a parameter {unknown[1]}, or leave {unknown[1]}= away"
            )
        return RoutineError(
            f"{what}There are {there}; select some, as by {word}=[0], give the routine a parameter for each, "
            f"or pass others as keywords, {action.type.value}(routine, name=value)"
        )
    except ValueError:  # written in C
        return None
    return None


def _values(count: int) -> str:
    return f"{count} value{'s' * (count != 1)}"


def _named(inputs: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, str]]:
    return [(value, names[i] if i < len(names) else "") for i, value in enumerate(inputs)]


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value:
        return f"{type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"

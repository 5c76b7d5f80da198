"""The arguments of replacements, and errors for routines whose signature cannot take their arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import RoutineError

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RoutineParameters:
    """Parameters of a routine that the op's inputs may fill.

    positional: names of parameters that a position fills.  named: names of keyword-only parameters.
    variadic, any_name: whether the routine has `*args`, and `**kwargs`.
    """

    __slots__ = ("any_name", "named", "positional", "variadic")

    def __init__(self, routine: Routine, bound_names: Iterable[str]) -> None:
        parameters = inspect.signature(routine).parameters.values()
        free_parameters = [parameter for parameter in parameters if parameter.name not in set(bound_names)]
        self.positional = [parameter.name for parameter in free_parameters if parameter.kind in _POSITIONAL]
        self.named = frozenset(
            parameter.name for parameter in free_parameters if parameter.kind is parameter.KEYWORD_ONLY
        )
        self.variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in free_parameters)
        self.any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in free_parameters)


def parameters_of(routine: Routine, bound_names: Iterable[str]) -> RoutineParameters | None:
    """Return the parameters of a routine except the bound ones; None for a routine written in C."""
    try:
        return RoutineParameters(routine, bound_names)
    except (TypeError, ValueError):
        return None


def replacement_arguments(
    parameters: RoutineParameters | None,
    inputs: Sequence[Any],
    names: Sequence[str],
    holds_tensors: Callable[[Any], bool],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a replacement, by position and by name.

    A replacement receives the op's tensors in order, and other inputs by name where it has a parameter of
    that name. If it has as many parameters as the op has inputs, or any number, it receives all in order.
    """
    if parameters is None:
        return [value for value in inputs if holds_tensors(value)], {}
    if parameters.variadic or len(parameters.positional) >= len(inputs):
        named = {name: value for name, value in zip(names, inputs, strict=False) if name in parameters.named}
        return [value for value, name in _with_names(inputs, names) if name not in named], named
    parameter_names = {*parameters.positional, *parameters.named}
    by_name = {
        name: value
        for value, name in _with_names(inputs, names)
        if name and not holds_tensors(value) and (name in parameter_names or parameters.any_name)
    }
    unnamed = [value for value, name in _with_names(inputs, names) if name not in by_name]
    tensors = [value for value in unnamed if holds_tensors(value)]
    free_positions = sum(name not in by_name for name in parameters.positional)
    leading = unnamed[:free_positions]
    all_tensors = sum(map(holds_tensors, leading)) == len(tensors)
    return (leading if len(tensors) < free_positions and all_tensors else tensors), by_name


def signature_error(
    action: Action,
    inputs: Sequence[Any],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RoutineError | None:
    """Return the error for a routine whose signature cannot take its arguments; None if it can.

    inputs, names: values that the routine could have selected, and their names.
    """
    injected = {name: None for name in ("run", "shapes") if getattr(action, f"takes_{name}")}
    try:
        inspect.signature(action.func).bind(*args, **{**injected, **action.kwargs, **kwargs})
    except TypeError as error:
        available = ", ".join(f"{i}: {name or '?'} ({_type_and_shape(value)})" for i, (value, name) in
                          enumerate(_with_names(inputs, names)))  # fmt: skip
        keyword = "outputs" if action.type.is_after else "inputs"
        keyword = f"grad_{keyword}" if action.type.is_backward else keyword
        message = f"{action} cannot be called with {_count_of_values(len(args))}: {error}. "
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is not None:
            return RoutineError(
                f"{message}Give the routine a parameter {unknown[1]}, or leave {unknown[1]}= away"
            )
        return RoutineError(
            f"{message}There are {available}; select some, as by {keyword}=[0], give the routine a parameter "
            f"for each, or pass others as keywords, {action.type.value}(routine, name=value)"
        )
    except ValueError:  # `inspect` knows no signature: the routine is written in C
        return None
    return None


def _count_of_values(count: int) -> str:
    return f"{count} value{'s' * (count != 1)}"


def _with_names(inputs: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, str]]:
    return [(value, names[i] if i < len(names) else "") for i, value in enumerate(inputs)]


def _type_and_shape(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value:
        return f"{type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"

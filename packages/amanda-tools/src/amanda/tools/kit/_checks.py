"""Checks of options that several tools have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import AmandaError


def check_one_of(option: str, given: Any, choices: Sequence[Any], error: type[AmandaError]) -> None:
    """Raise an error that lists the choices of an option, unless what was given is one of them."""
    if given not in choices:
        raise error(f"{option} is {given!r}; it is one of {', '.join(map(repr, choices))}")


def check_number(value: Any, evaluate: Any, error: type[AmandaError]) -> float:
    """Return what a function of the user gave as a number; raise an error for what is none."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as found:  # torch's own, for several numbers
        name = getattr(evaluate, "__qualname__", evaluate)
        raise error(f"{name} gave {value!r}; give a number, such as an accuracy") from found

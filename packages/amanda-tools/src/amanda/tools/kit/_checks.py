"""Checks of options that several tools have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import AmandaError


def check_one_of(option: str, given: Any, choices: Sequence[Any], error: type[AmandaError]) -> None:
    """Raise an error that lists the choices of an option, unless what was given is one of them."""
    if given not in choices:
        raise error(f"{option} is {given!r}; it is one of {', '.join(map(repr, choices))}")

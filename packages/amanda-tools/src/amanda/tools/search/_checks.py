"""Checks of what the tool and the search are given."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.kit import check_one_of


class SearchError(AmandaError, ValueError):
    """A choice, an architecture, a budget or a model with which nothing can be searched."""


def check_type(option: str, given: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise an error that says what an option is, unless it is of a type."""
    if not isinstance(given, kind):
        raise SearchError(f"{option} is {given!r}; give {wanted}")


def check_integer(option: str, given: Any, least: int) -> None:
    """Raise an error unless an option is an integer from a bound on."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise SearchError(f"{option} is {given!r}; give a number from {least} on")


def check_real(option: str, given: Any, most: float | None = None) -> None:
    """Raise an error unless an option is a finite number from 0 on, up to a bound if there is one."""
    is_number = isinstance(given, Real) and not isinstance(given, bool) and isfinite(given)
    if not is_number or given < 0 or (most is not None and given > most):
        span = "from 0 on" if most is None else f"from 0 to {most:g}"
        raise SearchError(f"{option} is {given!r}; give a finite number {span}")


def check_limits(option: str, given: Any, costs: tuple[str, ...]) -> None:
    """Raise an error unless limits are numbers by the names of costs."""
    if given is None:
        return
    check_type(option, given, Mapping, "a dict such as {'flops': 1e6}")
    for cost, most in given.items():
        check_one_of(option, cost, costs, SearchError)
        check_real(f"{option} of {cost}", most)

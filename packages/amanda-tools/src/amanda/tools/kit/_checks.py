"""Checks of what functions of the user give."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

from amanda.errors import AmandaError

T = TypeVar("T")

logger = logging.getLogger("amanda")


def check_number(value: Any, evaluate: Any, error: type[AmandaError]) -> float:
    """Return what a function of the user gave as a number; raise an error for what is none."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as found:  # torch's own, for several numbers
        name = getattr(evaluate, "__qualname__", evaluate)
        raise error(f"{name} gave {value!r}; give a number, such as an accuracy") from found


def check_finite(name: str, value: float) -> float:
    """Return a number; raise ValueError for NaN and infinity."""
    if not isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value


def attempt(measure: Callable[[], T], told: str) -> tuple[T | None, str]:
    """Return what a function of the user gives, and ""; or None, and its exception as text, which is logged.

    Amanda's own errors and KeyboardInterrupt reach the caller.
    """
    try:
        return measure(), ""
    except AmandaError:
        raise
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        logger.warning("%s: %s", told, error)
        return None, error

"""Progress of trials on stderr, and numbers that functions of the user return."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

from amanda.action import routine_name
from amanda.errors import AmandaError

T = TypeVar("T")

logger = logging.getLogger("amanda")


class Progress:
    """Show a bar on a terminal, elsewhere a line for each point."""

    def __init__(self, is_visible: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, soft_wrap=True)
        self._lines = is_visible and not self._console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            console=self._console, transient=True, disable=self._lines or not is_visible,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._count = self._total = 0
        self._description = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # else it would end a line that nobody began
            self._bar.stop()

    def begin(self, total: int, description: str, count: int = 0) -> None:
        """Announce the measurement of a point.  count: points measured before it."""
        self._count, self._total, self._description = count, total, description
        self._bar.update(self._task, description=description, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """Report the outcome of the point."""
        self._bar.update(self._task, completed=self._count + 1)
        if self._lines:
            line = f"{self._count + 1}/{self._total} {self._description}: {outcome}"
            self._console.print(line, highlight=False, markup=False)

    def advance(self, count: int, total: int, description: str, outcome: str) -> None:
        """Report that `count` of many trials have ended; away from a terminal, in twenty lines."""
        self.begin(total, description, count - 1)
        self._bar.update(self._task, completed=count)
        if count % max(1, total // 20) == 0:
            self.done(outcome)

    @staticmethod
    def attempt(measure: Callable[[], T], description: str) -> tuple[T | None, str]:
        """Return the value of a function of the user, and ""; or None and its exception, as text.

        The exception is logged with the description.  Errors of Amanda and interrupts reach the caller.
        """
        try:
            return measure(), ""
        except AmandaError:
            raise
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            logger.warning("%s: %s", description, error)
            return None, error


def check_number(value: Any, evaluate: Any, error: type[AmandaError], name: str = "") -> float:
    """Return a number, from the value that a function of the user, `evaluate`, returned.

    Raises an `error` for a value that is not a number, and ValueError for one that is not finite.

    Args:
        name: Of the number, where it has to be finite; "" for a number that may be NaN or infinite.
    """
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as reason:  # torch's own, for several numbers
        raise error(
            f"{routine_name(evaluate)} gave {value!r}; give a number, such as an accuracy"
        ) from reason
    if name and not isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number

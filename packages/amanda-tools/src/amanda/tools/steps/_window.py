"""The window of steps at which a tool's routines run."""

from __future__ import annotations

import functools
from typing import Any

import amanda
from amanda.action import Routine, has_run, marks
from amanda.errors import AmandaError
from amanda.tools.steps._steps import Steps


class WindowError(AmandaError, ValueError):
    """Steps that cannot be: a negative start, an end before it, a frequency below one."""


class Window:
    """The steps of `range(start, end, frequency)`; `open` tells whether the present one is among them.

    `let` makes a tool's routines run at those alone. Its analysis routines run once per op as ever. What
    one execution of an op hands from routine to routine as `run` stays consistent: the first of them
    decides for all, so that a backward routine does not miss what its forward routine left out.
    """

    def __init__(self, steps: Steps, start: int = 0, end: int | None = None, frequency: int = 1) -> None:
        for name, value, least in (("start", start, 0), ("frequency", frequency, 1)):
            if value < least:
                raise WindowError(f"{name} is {value}; it is a number of steps, {least} at least")
        if end is not None and end <= start:
            raise WindowError(f"end is {end}, start {start}: no step is in between (end is left out)")
        self._start, self._end, self._frequency = start, end, frequency
        self.steps = steps
        self.open = False
        steps.on_step(self._turn)

    def let(self, tool: amanda.Tool) -> None:
        """Make the tool's routines run at steps of the window alone."""
        tool.depends_on(self.steps)
        tool.wrap_routines(self._gated)

    def _turn(self, number: int) -> None:
        begun = number >= self._start and (self._end is None or number < self._end)
        self.open = begun and (number - self._start) % self._frequency == 0

    def _gated(self, context: amanda.OpContext, type: amanda.ActionType, routine: Routine) -> Routine:
        window, skipped = self, NotImplemented if type.is_replacement else None

        def gated(*values: Any, **kwargs: Any) -> Any:
            return routine(*values, **kwargs) if window.open else skipped

        def gated_with_run(*values: Any, run: Any, **kwargs: Any) -> Any:
            decided = run.setdefault(window, window.open) if isinstance(run, dict) else window.open
            return routine(*values, run=run, **kwargs) if decided else skipped

        wrapper: Routine = gated_with_run if has_run(routine) else gated
        functools.update_wrapper(wrapper, routine, updated=())
        for mark in marks(routine) - {"traceable"}:  # inlined into a graph it would be decided for good
            wrapper = getattr(amanda, mark)(wrapper)
        return wrapper

"""The window of steps at which a tool's routines run."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import amanda
from amanda.action import Routine, has_run, marks
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveInt, checked
from amanda.tools.steps._steps import Steps


class WindowError(AmandaError, ValueError):
    """Steps that cannot be: a negative start, an end before it, a frequency below one."""


class Window:
    """The steps of `range(start, end, frequency)`; `open` tells whether the present one is among them.

    `let` makes a tool's routines run at those alone. Its analysis routines run once per op as ever. What
    one execution of an op hands from routine to routine as `run` stays consistent: the first of them
    decides for all, so that a backward routine does not miss what its forward routine left out.
    """

    @checked(error=WindowError)
    def __init__(
        self,
        steps: Steps,
        start: NonNegativeInt = 0,
        end: NonNegativeInt | None = None,
        frequency: PositiveInt = 1,
    ) -> None:
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
        takes_run = has_run(routine)
        # Routines that change values decide in a recomputation as they did at first; observers hear once.
        changes = context.is_eager() and context.is_forward() and "observer" not in marks(routine)
        signature = _with_run(routine) if changes and not takes_run else None

        def gated(*values: Any, **kwargs: Any) -> Any:
            return routine(*values, **kwargs) if window.open else skipped

        def gated_with_run(*values: Any, run: Any, **kwargs: Any) -> Any:
            decided = run.setdefault(window, window.open) if isinstance(run, dict) else window.open
            if takes_run:
                kwargs["run"] = run
            return routine(*values, **kwargs) if decided else skipped

        wrapper: Routine = gated_with_run if takes_run or signature else gated
        functools.update_wrapper(wrapper, routine, updated=())
        if signature is not None:
            wrapper.__signature__ = signature  # type: ignore[attr-defined]
        for mark in marks(routine) - {"traceable"}:  # inlined into a graph it would be decided for good
            wrapper = getattr(amanda, mark)(wrapper)
        return wrapper


def _with_run(routine: Routine) -> inspect.Signature | None:
    """Return the signature of a routine with a keyword `run` besides; None of one written in C."""
    try:
        signature = inspect.signature(routine)
    except (TypeError, ValueError):
        return None
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    kinds = [*signature.parameters.values()]
    if kinds and kinds[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return signature.replace(parameters=[*kinds[:-1], run, kinds[-1]])
    return signature.replace(parameters=[*kinds, run])

"""The dicts `run` of executions whose routines native code calls."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amanda.plan.results import matched

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps

Routine = Callable[..., Any]


class Runs:
    """The dict of the execution under way in each thread, for the routines at one op that take `run`.

    The first that needs the dict begins it, the last ends it.  No op executes within itself, since the ops
    within it have other places; an execution that raised leaves its dict to the next one, which begins anew.
    """

    __slots__ = ("_present",)

    def __init__(self) -> None:
        self._present: dict[int, dict[str, Any]] = {}

    def begin(self) -> dict[str, Any]:
        """Return the dict of an execution that begins."""
        run = self._present[get_ident()] = {}
        return run

    def end(self) -> dict[str, Any]:
        """Return the dict of the execution under way, which native code needs no more."""
        return self._present.pop(get_ident(), {})

    def resumed(self, called: Sequence[Action]) -> dict[str, Any]:
        """Return the dict for Python, which goes on after native code has called some routines."""
        return self.end() if any(action.takes_run for action in called) else {}

    def routines(
        self, ops: TensorOps, before: Sequence[Action], after: Sequence[Action], traced: bool
    ) -> dict[Action, Routine]:
        """Return the routines of actions that take `run` as native code calls them: without it.

        traced: whether the dict is handed on as the op has run, ahead of the routines after it.
        """
        earlier, later = ([one for one in side if one.takes_run] for side in (before, after))
        stages = [*earlier, *([None] if traced else []), *later]
        last = len(stages) - 1
        return {
            action: _given(ops, action, self._of_thread if i else self.begin, self.end if i == last else None)
            for i, action in enumerate(stages)
            if action is not None
        }

    def handed_on(self, before: Sequence[Action], after: Sequence[Action]) -> dict[str, Any]:
        """Return the dict as the op has run, for its backward ops."""
        run = self._of_thread() if any(one.takes_run for one in before) else self.begin()
        return run if any(one.takes_run for one in after) else self.end()

    def _of_thread(self) -> dict[str, Any]:
        run = self._present.get(get_ident())
        return self.begin() if run is None else run  # an op that made no node has handed nothing on


def _given(
    ops: TensorOps, action: Action, present: Callable[[], dict[str, Any]], end: Callable[[], Any] | None
) -> Routine:
    """Return a routine that is given the dict, and no graph that the dict could keep alive."""
    func, isolated = action.func, not action.differentiable

    def routine(*values: Any, **kwargs: Any) -> Any:
        run = present()
        given = [ops.kept(value) for value in values] if isolated else values
        result = func(*given, run=run, **kwargs)
        if end is not None:
            end()
        if not isolated or result is None:
            return result
        own = {id(one): value for one, value in zip(given, values, strict=True)}
        return [own.get(id(one), one) for one in matched(action, result, values) or ()]

    return routine

"""Plans as programs of the native interceptor, which runs routines without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda._notes import add_note, describe
from amanda._routine import mutation

if TYPE_CHECKING:
    from amanda._eager import Call
    from amanda._plan import Combined
    from amanda.action import Action
    from amanda.context import OpFacts


def program_of(
    combined: Combined,
    call: Call,
    facts: OpFacts,
    trace: Callable[..., None] | None,
    refuse: Callable[[Any], bool] | None,
) -> interceptor.Program | None:
    """What native code shall do at calls like this one; None where it cannot.

    trace: hears of the backward ops that the op made, if they are wanted.
    refuse: whether a call with this first argument is for Python, if that differs among calls like these.

    It hands values to routines and sees that they are left alone; a routine that returns another
    value is where Python goes on.
    """
    sources = call.sources()
    if sources is None or combined.replace or any(action.takes_run for action in combined.actions):
        return None
    if call.mutable and any(action.differentiable for action in combined.actions):
        return None
    constants = tuple(
        value if source == -1 else None for value, source in zip(call.inputs, sources, strict=True)
    )
    return _program(combined.before, combined.after, facts, sources, constants, combined, trace, refuse)


def program_on_values(actions: Sequence[Action], facts: OpFacts) -> interceptor.Program | None:
    """The same for routines on values that are there already, such as gradients; none takes `run`."""
    return _program(actions, (), facts)


def _program(
    before: Sequence[Action], after: Sequence[Action], facts: OpFacts, *form: Any
) -> interceptor.Program | None:
    told = _Told((*before, *after), facts)
    steps = [tuple(map(_step, actions)) for actions in (before, after)]
    try:
        return interceptor.Program(*steps, told, *form)
    except ValueError:  # more values than native code has room for
        return None


def _step(action: Action) -> tuple[Any, ...]:
    lock = action.tool._amanda.lock
    return action.func, action.select, dict(action.kwargs), lock, not action.differentiable


class _Told:
    """Says in Python what went wrong in native code."""

    __slots__ = ("_actions", "_facts")

    def __init__(self, actions: Sequence[Action], facts: OpFacts) -> None:
        self._actions = actions
        self._facts = facts

    def failed(self, step: int, error: BaseException) -> None:
        """Note on a routine's exception where it comes from."""
        action = self._actions[step]
        add_note(error, describe(self._facts, action.tool, str(action)))

    def mutated(self, step: int, index: int) -> None:
        """Raise for a routine that wrote into a value that it was given."""
        raise mutation(self._actions[step], index)

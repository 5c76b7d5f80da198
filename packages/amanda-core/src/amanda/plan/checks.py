"""Checks of an action: whether it may be recorded at an op, and for which values of the op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from amanda.errors import ActionError, ReplaceConflictError
from amanda.plan.action import Action, ActionType, InstrumentationPoint

if TYPE_CHECKING:
    from amanda.plan.facts import OpFacts
    from amanda.plan.tools import AnyTool

Selection = int | str | Sequence[int | str] | None


def check_point(facts: OpFacts, kind: ActionType, point: InstrumentationPoint) -> None:
    """Raise ActionError for an action that the point at which it is recorded does not allow.

    A graph is analysed before it runs: there a routine that requires outputs may act before the op, too.
    """
    if kind.is_backward != point.is_backward:
        backward = "backward=True" if kind.is_backward else "backward=False"
        raise ActionError(
            f"{kind.value} was called at {point.value} of {facts.name}; call it in a "
            f"callback registered with add_inst_for_op(callback, {backward})"
        )
    if point.is_after and not kind.is_after and facts.namespace[-1] == "eager":
        raise ActionError(
            f"{kind.value} was called at {point.value} of {facts.name}, when the op had run; "
            "call it in a callback registered with require_outputs=False"
        )


def check_replacement(facts: OpFacts, kind: ActionType, tool: AnyTool, recorded: Iterable[Action]) -> None:
    """Raise an error where the op cannot be replaced, or is replaced already."""
    if kind.is_backward and not facts.replaceable:
        raise ActionError(
            f"{facts.name} cannot be replaced; change its gradient with insert_before_backward_op"
        )
    for action in recorded:
        if action.type is kind:
            raise ReplaceConflictError(
                f"{type(tool).__name__} wants to replace {facts.name}, which "
                f"{type(action.tool).__name__} replaces already; one op has one replacement: "
                "apply one of the two, or let one use insert_before_op or insert_after_op"
            )


def selected_positions(
    facts: OpFacts, kind: ActionType, select: int | str | Sequence[int | str]
) -> tuple[int, ...]:
    """Return the positions of the op's values that an action selects."""
    keys = (select,) if isinstance(select, (int, str)) else tuple(select)
    takes_inputs = kind in (ActionType.INSERT_BEFORE_OP, ActionType.REPLACE_OP)
    inputs = facts.inputs
    count = len(inputs) if takes_inputs and inputs is not None else None
    return resolve_positions(facts, keys, kind.value, count)


def resolve_positions(
    facts: OpFacts, keys: tuple[int | str, ...], method: str, count: int | None
) -> tuple[int, ...]:
    """Return the positions of values selected by position or name.

    keys: positions or names.  count: number of values; None where the number is unknown.
    method: name of the calling method, for the ActionError where there is no such value.
    """
    names = list(facts.names)
    indices = []
    for key in keys:
        if isinstance(key, str) and key in names and count is not None:
            key = names.index(key)
        valid = isinstance(key, int) and not isinstance(key, bool)
        if not valid or (count is not None and not -count <= int(key) < count):
            described_values = ", ".join(names) if names and count is not None else "given by position"
            near = get_close_matches(str(key), names, n=1) if count is not None else []
            raise ActionError(
                f"{method} of {facts.name} was asked for {key!r}; it has "
                f"{'some' if count is None else count} values ({described_values})"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        indices.append(int(key) + count if count is not None and int(key) < 0 else int(key))
    return tuple(indices)

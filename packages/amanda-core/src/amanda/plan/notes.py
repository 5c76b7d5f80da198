"""Notes on exceptions with the tool, the op and the line of the program where they were raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda import interceptor

if TYPE_CHECKING:
    from types import TracebackType

    from amanda.plan.facts import OpFacts
    from amanda.plan.tools import AnyTool


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once.

    A TypeError is also stored in the interceptor, which raises it again: operator methods of frameworks turn
    a TypeError into NotImplemented.
    """
    if isinstance(error, TypeError):
        interceptor.keep_failure(error)
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


class explain_errors:
    """Context that adds tool, op, id, point, module path and the user's line to an exception."""

    __slots__ = ("_at", "_facts", "_tool")

    def __init__(self, facts: OpFacts, tool: AnyTool, at: str) -> None:
        self._facts = facts
        self._tool = tool
        self._at = at

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            add_note(error, describe(self._facts, self._tool, self._at))


def describe(facts: OpFacts, tool: Any, at: str) -> str:
    """Return a line with the tool, the action or point, the op and its place in the program."""
    op_id = facts.op_id if facts.backward_op_id is None else facts.backward_op_id
    where = f", module {facts.scope}" if facts.scope else ""
    line = f", called from {facts.source}" if facts.source else ""
    return f"[amanda] tool {type(tool).__name__}, {at} of {facts.name} (op {op_id:#018x}{where}{line})"

"""Tools that the suite applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from amanda.context import OpContext
from amanda.tool import Tool

Callback = Callable[[OpContext], Any]

FORWARD_POINTS: list[dict[str, Any]] = [{}, {"require_outputs": True}]
BACKWARD_POINTS: list[dict[str, Any]] = [{"backward": True}, {"backward": True, "require_outputs": True}]
POINTS = FORWARD_POINTS + BACKWARD_POINTS


def op_name(context: OpContext) -> str:
    """`__name__` of the op that the context is of, forward or backward."""
    op = context.get_op() if context.is_forward() else context.get_backward_op()
    return str(op.__name__)


def notes(error: BaseException) -> list[str]:
    """The notes on an exception, also before Python 3.11."""
    return list(getattr(error, "__notes__", []))


def tool(callback: Callback, only: str | None = None, **where: Any) -> Tool:
    """A tool with one analysis routine, at every op or at those of one name."""
    built = Tool()
    also(built, callback, only, **where)
    return built


def also(built: Tool, callback: Callback, only: str | None = None, **where: Any) -> Tool:
    """The tool with another analysis routine."""

    def analysis(context: OpContext) -> None:
        if only is None or op_name(context) == only:
            callback(context)

    built.add_inst_for_op(analysis, **where)
    return built


Insertion = Literal[
    "insert_before_op",
    "insert_after_op",
    "replace_op",
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
]


def inserting(action: Insertion, only: str, routine: Callable[..., Any], *select: Any, **kwargs: Any) -> Tool:
    """A tool that records one action at the ops of one name."""
    return tool(
        lambda context: getattr(context, action)(routine, *select, **kwargs),
        only,
        backward="backward" in action,
    )


class Seen(Tool):
    """Keeps what it meets: (name, id) of each op analysed, forward or backward."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, int]] = []
        self.add_inst_for_op(self._forward)

    def _forward(self, context: OpContext) -> None:
        self.ops.append((op_name(context), context.get_op_id()))

    def ids(self, name: str) -> list[int]:
        """Ids of the ops of one name, as analysed."""
        return [op_id for op, op_id in self.ops if op == name]


class Executed(Tool):
    """Keeps the id of each op of one name at every execution."""

    def __init__(self, only: str) -> None:
        self.ids: list[int] = []
        also(self, self._insert, only)

    def _insert(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(lambda *_: self.ids.append(op_id))


def no_op() -> Tool:
    """A tool with routines everywhere that change nothing."""
    built = Tool()
    built.add_inst_for_op(lambda context: context.insert_before_op(_unchanged))
    built.add_inst_for_op(lambda context: context.insert_after_op(_unchanged), require_outputs=True)
    built.add_inst_for_op(lambda context: context.insert_before_backward_op(_unchanged), backward=True)
    built.add_inst_for_op(
        lambda context: context.insert_after_backward_op(_unchanged), backward=True, require_outputs=True
    )
    return built


def _unchanged(*_: Any) -> None:
    return None

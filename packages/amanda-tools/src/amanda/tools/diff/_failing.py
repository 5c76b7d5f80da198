"""The op at which a compiled program fails, as where the compiler cannot compile it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amanda
from amanda.tools.diff._programs import Extra
from amanda.tools.diff._run import Run

_MOST = 1 << 16
"""Ops among which one is looked for."""


class OpaqueTool(amanda.Tool):
    """Takes ops out of compiled code, in the order of analysis from `first` on: each calls the eager op."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first
        self._met: set[int] = set()
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_id() not in self._met:
            self._met.add(context.get_op_id())
            if len(self._met) > self._first:
                context.replace_op(self._call, op=context.get_op())

    def _call(self, *inputs: Any, op: Callable[..., Any]) -> Any:
        return op(*inputs)


def failing(record: Callable[[Extra], Run], error: Exception) -> tuple[Run, int]:
    """Return a run whose ops are eager from the first one on that fails where it is compiled, and its index.

    record: runs the program under a tool.  The op is the last of the fewest first ops that fail as they are
    compiled alone.  Raises the error, which the program raised, where it is raised with no op compiled too.
    """

    def tried(first: int) -> Run | None:
        try:
            return record((OpaqueTool, {"first": first}))
        except Exception as found:
            if type(found) is not type(error):
                raise error from found
            return None

    found = tried(0)
    if found is None:
        raise error
    works, fails = 0, 1
    while (run := tried(fails)) is not None:
        found, works, fails = run, fails, 2 * fails
        if fails > _MOST:
            raise error
    while fails - works > 1:
        middle = (works + fails) // 2
        run = tried(middle)
        if run is None:
            fails = middle
        else:
            found, works = run, middle
    forward = [index for index, op in enumerate(found.ops) if op.phase != "backward"]
    return found, forward[works]

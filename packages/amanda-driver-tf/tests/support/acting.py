"""Tools with one action each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amanda


def inserting(action: str, only: str, routine: Callable[..., Any], *select: Any, **kwargs: Any):
    """A tool that records one action at the operations of one type, forward or backward."""
    backward, after = "backward" in action, "after" in action

    def analysis(context) -> None:
        op = context.get_backward_op() if backward else context.get_op()
        if op.type == only:
            getattr(context, action)(routine, *select, **kwargs)

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis, backward=backward, require_outputs=after)
    return tool

"""What StandardMapping calls the ops of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amanda
from amanda.tools.mapping import StandardMapping


def types_in(run: Callable[[], Any]) -> list[str]:
    """Types of the ops that are analysed, in order."""
    seen: list[str] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: seen.append(context["type"]))
    with amanda.apply(tool):
        run()
    return seen

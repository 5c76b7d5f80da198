"""What a scope could not instrument, or ran otherwise than the program would, and why."""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger("amanda")

RAN_OP_BY_OP = (
    "ran op by op, as eager code: what the compiler made of it did not run; "
    'compiled="instrument" puts tools into the compiled code'
)
"""Reason of a report on a compiled callable that ran its Python code."""


class Uninstrumented(NamedTuple):
    """One thing that tools did not see, or that ran otherwise than the program would have run it."""

    what: str
    reason: str
    where: str


class Report(list[Uninstrumented]):
    """What a scope could not instrument, or ran otherwise; each thing once, however often it came up."""

    @property
    def op_by_op(self) -> list[Uninstrumented]:
        """Compiled callables, and graphs of theirs, that ran as eager code."""
        return [entry for entry in self if "op by op" in entry.reason]

    def add(self, what: str, reason: str, where: str = "") -> None:
        """Note something, and log it the first time."""
        entry = Uninstrumented(what, reason, where)
        if entry not in self:
            self.append(entry)
            logger.warning("%s: %s%s", what, reason, f" ({where})" if where else "")

    def __str__(self) -> str:
        if not self:
            return "everything that ran was instrumented"
        width = max(len(entry.what) for entry in self)
        lines = [
            f"{entry.what:<{width}}  {entry.reason}{f'  [{entry.where}]' if entry.where else ''}"
            for entry in self
        ]
        return "\n".join(lines)

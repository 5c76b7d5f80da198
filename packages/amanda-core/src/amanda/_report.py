"""What a scope could not instrument, and why."""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger("amanda")


class Uninstrumented(NamedTuple):
    """One thing that tools did not see."""

    what: str
    reason: str
    where: str


class Report(list[Uninstrumented]):
    """What a scope could not instrument; each thing once, however often it came up."""

    def add(self, what: str, reason: str, where: str = "") -> None:
        """Note something, and log it the first time."""
        entry = Uninstrumented(what, reason, where)
        if entry not in self:
            self.append(entry)
            logger.warning("not instrumented: %s: %s%s", what, reason, f" ({where})" if where else "")

    def __str__(self) -> str:
        if not self:
            return "everything that ran was instrumented"
        width = max(len(entry.what) for entry in self)
        lines = [
            f"{entry.what:<{width}}  {entry.reason}{f'  [{entry.where}]' if entry.where else ''}"
            for entry in self
        ]
        return "\n".join(lines)

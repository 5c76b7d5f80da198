"""The result of a budget: evictions and ops that ran again, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda.tools.remat._records import OpCounts
from amanda.tools.results import Column, Result, amount, shortened


class RematResult(Result):
    """A row for each op that ran again or had storages evicted, the most seconds first.

    budget: bytes, None for no bound.  peak: the most bytes that were alive at once.
    short: the most bytes by which an op exceeded the budget, 0 where it was held.
    """

    name: ClassVar[str] = "remat"
    title = "Rematerialisation"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"),
        Column("type"),
        Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)),
        Column("evictions", show="{:,}".format, total=True, merge="sum"),
        Column("evicted", show=partial(amount, unit="B"), total=True, unit="B", merge="sum"),
        Column("rematerialisations", show="{:,}".format, total=True, merge="sum"),
        Column("seconds", show="{:.4f}".format, total=True, unit="s", merge="sum"),
    )

    def __init__(self, counts: Sequence[OpCounts], budget: int | None, peak: int, short: int) -> None:
        self._counts = sorted(
            (one for one in counts if one.evictions or one.rematerialisations),
            key=lambda one: (-one.seconds, -one.evicted_bytes),
        )
        self.budget = budget
        self.peak = peak
        self.short = max(short, 0 if budget is None else peak - budget)

    @property
    def evictions(self) -> int:
        """Number of evictions."""
        return sum(one.evictions for one in self._counts)

    @property
    def rematerialisations(self) -> int:
        """Number of ops that ran again."""
        return sum(one.rematerialisations for one in self._counts)

    @property
    def seconds(self) -> float:
        """Seconds in ops that ran again."""
        return sum(one.seconds for one in self._counts)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op."""
        return [
            ("forward", one.type, one.module, one.source, one.evictions, one.evicted_bytes,
             one.rematerialisations, one.seconds)
            for one in self._counts
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the budget, the peak, and the bytes by which the budget was exceeded."""
        return {"budget": self.budget, "peak": self.peak, "short": self.short}

    def notes(self) -> Sequence[str]:
        """Return sentences on the peak and the budget."""
        peak = f"At most {self.peak:,} bytes of storages that ops had made were alive"
        if self.budget is None:
            return [f"{peak}; there was no budget."]
        notes = [f"{peak}; the budget was {self.budget:,}."]
        if self.short:
            notes.append(f"The budget was exceeded by up to {self.short:,} bytes that could not be evicted.")
        return notes

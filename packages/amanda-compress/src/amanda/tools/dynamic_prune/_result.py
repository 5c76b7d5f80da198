"""The result of dynamic pruning: a row for each op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.results import Column, Result, amount, shortened

KEYS = ("phase", "type", "module", "source")


@dataclass(eq=False)
class Pruned:
    """Sums over the executions of one op, which stay on the device of the tensors.

    unit: "channels", "positions" or "tokens".  share: sum of the pruned shares of the units.
    macs: multiply-accumulates of the dense op.  saved: those that pruned units would not need.
    """

    type: str
    module: str
    source: str
    unit: str
    executions: int = 0
    share: Any = 0.0
    macs: int = 0
    saved: Any = 0.0

    def add(self, share: Any, macs: int, saved: Any) -> None:
        """Add an execution; share and saved: tensors without gradient, or numbers."""
        self.executions += 1
        self.share = self.share + share
        self.macs += macs
        self.saved = self.saved + saved * macs

    def clear(self) -> None:
        """Forget the executions."""
        self.executions, self.share, self.macs, self.saved = 0, 0.0, 0, 0.0


class DynamicPruneResult(Result):
    """A row for each op: the pruned share, and the multiply-accumulates that pruning would save."""

    name: ClassVar[str] = "dynamic_prune"
    title = "Dynamic pruning"
    columns = (
        *(Column(key, show=partial(shortened, width=24)) for key in KEYS),
        Column("unit"),
        Column("executions", show="{:,}".format, number=True),
        Column("pruned", show="{:.1%}".format, number=True, unit="share"),
        Column("MACs", show=amount, total=True),
        Column("saved MACs", show=amount, total=True),
    )

    def __init__(self, pruned: Iterable[Pruned], notes: Sequence[str] = ()) -> None:
        self._rows = [
            ("forward", one.type, one.module, one.source, one.unit, one.executions,
             float(one.share) / one.executions, one.macs, round(float(one.saved)))
            for one in pruned
            if one.executions
        ]  # fmt: skip
        self._notes = (
            "MACs of the dense ops; saved are those that an implementation need not compute which skips "
            "what is pruned.",
            *notes,
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op that was executed."""
        return self._rows

    def notes(self) -> Sequence[str]:
        """Return sentences on the numbers, and on ops that were not pruned."""
        return self._notes

    @property
    def saved(self) -> float:
        """Return the saved share of the multiply-accumulates of all ops."""
        macs = sum(row[-2] for row in self._rows)
        return sum(row[-1] for row in self._rows) / macs if macs else 0.0

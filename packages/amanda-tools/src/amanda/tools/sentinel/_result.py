"""Result of the sentinel: alarms, and a row for each watched op."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

from amanda.tools.kit import OpRecord
from amanda.tools.results import Column, Result, shortened
from amanda.tools.sentinel._alarms import Alarm, Spikes

VARIES = "gave other bits at each run"
"""Why an op is not run again that turned out to be nondeterministic."""
_number = "{:,}".format


@dataclass(eq=False)
class Watched(OpRecord):
    """One op that was watched.

    left: why it is not run again; "" if it is.  executions: in watched steps.  recomputed: that were run
    again.  corrupt: of these, with other bits.  norms: of each output or gradient.  last: the last norm.
    hash: of the first output, with the step at which it was taken last.
    """

    left: str = ""
    executions: int = 0
    recomputed: int = 0
    corrupt: int = 0
    norms: dict[str, Spikes] = field(default_factory=dict)
    last: float | None = None
    hash: str = ""


@dataclass
class Counts:
    """Steps, comparisons of ranks, and how often alarms of a step followed from the first."""

    steps: int = 0
    watched: int = 0
    comparisons: int = 0
    followed: int = 0
    skipped: int = 0


class SentinelResult(Result):
    """A row for each watched op, and the alarms in order.

    alarms: alarms that the tool kept.  counts: numbers of steps and comparisons.  spent, passed: seconds of
    watching, and of all steps.
    """

    name: ClassVar[str] = "sentinel"
    title = "Watched ops"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=36)),
        Column("source", show=partial(shortened, width=32)),
        Column("watched", show=_number, total=True, merge="sum"),
        Column("recomputed", show=_number, total=True, merge="sum"),
        Column("corrupt", show=_number, total=True, merge="sum"),
        Column("median norm", show="{:.4g}".format, number=True),
        Column("last norm", show="{:.4g}".format, number=True), Column("last hash"),
    )  # fmt: skip

    def __init__(
        self, ops: Sequence[Watched], alarms: Sequence[Alarm], counts: Counts, spent: float, passed: float,
        budget: float | None, dropped: int = 0,
    ) -> None:  # fmt: skip
        self.ops, self.alarms, self.counts = tuple(ops), tuple(alarms), counts
        self.spent, self.passed, self._budget, self._dropped = spent, passed, budget, dropped

    def __bool__(self) -> bool:
        return bool(self.alarms)

    @property
    def left(self) -> dict[str, int]:
        """The number of watched executions of ops that are not run again, by the reason."""
        found: Counter[str] = Counter()
        for op in self.ops:
            if op.left:
                found[op.left] += op.executions
        return dict(found.most_common())

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, in the order of execution; norms are of the first output."""
        return [
            (op.phase, op.type, op.module, op.source, op.executions, op.recomputed, op.corrupt,
             next((one.median for one in op.norms.values()), None), _finite(op.last), op.hash)
            for op in self.ops
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the alarms, counts and times."""
        return {
            "alarms": [asdict(one) for one in self.alarms], **asdict(self.counts), "left": self.left,
            "spent": self.spent, "passed": self.passed, "budget": self._budget, "dropped": self._dropped,
        }  # fmt: skip

    @property
    def leading(self) -> int:
        """One: the answer."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return the answer, further alarms, what was compared, what was left, and the cost."""
        counts = self.counts
        recomputed = sum(op.recomputed for op in self.ops)
        seen = f"{counts.watched:,} of {counts.steps:,} steps were watched"
        if self.alarms:
            more = len(self.alarms) - 1 + self._dropped
            further = f" There are {more:,} further alarms." if more else ""
            notes = [
                f"Alarm: {self.alarms[0]}.{further}",
                *(f"{one}." for one in self.alarms[1:10]),
                f"{seen}.",
            ]
        else:
            notes = [f"No alarm: {seen}, and {recomputed:,} ops that were run again gave the same bits."]
        if counts.followed:
            notes.append(f"{counts.followed:,} norms were NaN or spikes after the first of their step.")
        if counts.comparisons:
            notes.append(f"Gradients and parameters of the ranks were compared {counts.comparisons:,} times.")
        if counts.skipped:
            notes.append(f"Gradients overflowed in {counts.skipped:,} steps that a GradScaler skipped.")
        if self.left:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left.items())
            notes.append(f"Executions that were watched and not run again: {reasons}.")
        varying = [f"{op.type} ({op.phase}) of {op.module}" for op in self.ops if op.left == VARIES]
        if varying:
            rest = f" and {len(varying) - 5:,} more" if len(varying) > 5 else ""
            notes.append(f"Nondeterministic ops, which are no alarms: {', '.join(varying[:5])}{rest}.")
        if self.passed:
            budget = "without a budget" if self._budget is None else f"with a budget of {self._budget:.1%}"
            notes.append(f"Watching took {self.spent / self.passed:.2%} of {self.passed:,.1f} s, {budget}.")
        return notes


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

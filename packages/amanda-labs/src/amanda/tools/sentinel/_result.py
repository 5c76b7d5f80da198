"""Alarms, the norms that raise them, and the result of the sentinel."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

from amanda.errors import AmandaError
from amanda.tools.kit import OpRecord
from amanda.tools.results import Column, Result, shortened

Kind = Literal["corruption", "nan", "spike", "ranks"]


@dataclass(frozen=True)
class Alarm:
    """A fault in a step, and the op at which the fault began.

    kind: "corruption": an op that ran again on the same inputs gave other bits; "nan"; "spike": a norm far
    above those of earlier steps; "ranks": data-parallel ranks hold different gradients or parameters.
    module: for "ranks", the path of the parameter.
    """

    kind: Kind
    step: int
    phase: str
    type: str
    module: str
    source: str
    detail: str

    def __str__(self) -> str:
        module = f" of {self.module}" if self.module else ""
        source = f", {self.source}" if self.source else ""
        where = f"{self.type} ({self.phase}){module}{source}: " if self.type else ""
        return f"{self.kind} in step {self.step}: {where}{self.detail}"


class SentinelError(AmandaError, RuntimeError):
    """Raised at an alarm by a tool with `stop=True`; `alarm` is the alarm."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


class NormHistory:
    """Norms of one tensor in a window of executions, and the distance of a new norm from these.

    The distance is between logarithms, in robust standard deviations: 1.4826 times the median absolute
    deviation (Rousseeuw & Croux 1993), and at least `LEAST`.  Zeros are left out.
    """

    LEAST, ENOUGH = 0.1, 8

    def __init__(self, window: int) -> None:
        self._logs: deque[float] = deque(maxlen=window)

    def distance(self, norm: float) -> float:
        """Return the deviations of a norm above the median, 0.0 for few norms so far; add the norm."""
        if norm == 0 or math.isnan(norm):
            return 0.0
        value, logs = math.log(norm), self._logs
        distance = 0.0
        if len(logs) >= self.ENOUGH:
            middle = median(logs)
            spread = 1.4826 * median(abs(log - middle) for log in logs) if math.isfinite(middle) else 0.0
            distance = (value - middle) / max(spread, self.LEAST)
        logs.append(value)
        return 0.0 if math.isnan(distance) else distance

    @property
    def median(self) -> float | None:
        """The median of the norms in the window; None without any."""
        return math.exp(median(self._logs)) if self._logs else None


VARIES = "gave other bits at each run"
"""Reason not to run a nondeterministic op again."""
_number = "{:,}".format


@dataclass(eq=False)
class WatchedOp(OpRecord):
    """Counts and norms of one watched op.

    left: the reason not to run the op again; "" if it runs again.  executions: in watched steps.
    recomputed: executions that ran again.  corrupt: those with other bits.  norms: by output or gradient.
    last: the last norm.  hash: of the first output, with the step of the hash.
    """

    left: str = ""
    executions: int = 0
    recomputed: int = 0
    corrupt: int = 0
    norms: dict[str, NormHistory] = field(default_factory=dict)
    last: float | None = None
    hash: str = ""


@dataclass
class StepCounts:
    """Numbers of steps, of comparisons of ranks, and of NaN or spikes after the first in a step."""

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
        self, ops: Sequence[WatchedOp], alarms: Sequence[Alarm], counts: StepCounts, spent: float,
        passed: float, budget: float | None, dropped: int = 0,
    ) -> None:  # fmt: skip
        self.ops, self.alarms, self.counts = tuple(ops), tuple(alarms), counts
        self.spent, self.passed, self._budget, self._dropped = spent, passed, budget, dropped

    def __bool__(self) -> bool:
        return bool(self.alarms)

    @property
    def left(self) -> dict[str, int]:
        """Number of watched executions that were not run again, by the reason."""
        executions: Counter[str] = Counter()
        for op in self.ops:
            if op.left:
                executions[op.left] += op.executions
        return dict(executions.most_common())

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, in the order of execution; norms are of the first output."""
        return [
            (op.phase, op.type, op.module, op.source, op.executions, op.recomputed, op.corrupt,
             next((history.median for history in op.norms.values()), None), _finite(op.last), op.hash)
            for op in self.ops
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the alarms, counts and times."""
        return {
            "alarms": [asdict(alarm) for alarm in self.alarms], **asdict(self.counts), "left": self.left,
            "spent": self.spent, "passed": self.passed, "budget": self._budget, "dropped": self._dropped,
        }  # fmt: skip

    @property
    def leading(self) -> int:
        """One: the answer."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return the answer, further alarms, comparisons, executions that did not run again, and the cost."""
        counts = self.counts
        recomputed = sum(op.recomputed for op in self.ops)
        watched = f"{counts.watched:,} of {counts.steps:,} steps were watched"
        if self.alarms:
            more = len(self.alarms) - 1 + self._dropped
            further = f" There are {more:,} further alarms." if more else ""
            notes = [
                f"Alarm: {self.alarms[0]}.{further}",
                *(f"{alarm}." for alarm in self.alarms[1:10]),
                f"{watched}.",
            ]
        else:
            notes = [f"No alarm: {watched}, and {recomputed:,} executions that ran again gave the same bits."]
        if counts.followed:
            notes.append(f"{counts.followed:,} more norms were NaN or spikes, after the first in their step.")
        if counts.comparisons:
            notes.append(f"Gradients and parameters of the ranks were compared {counts.comparisons:,} times.")
        if counts.skipped:
            notes.append(f"Gradients overflowed in {counts.skipped:,} steps that a GradScaler skipped.")
        if self.left:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left.items())
            notes.append(f"Watched executions that were not run again: {reasons}.")
        varying = [f"{op.type} ({op.phase}) of {op.module}" for op in self.ops if op.left == VARIES]
        if varying:
            further_ops = f" and {len(varying) - 5:,} more" if len(varying) > 5 else ""
            notes.append(
                f"Nondeterministic ops, which give no alarms: {', '.join(varying[:5])}{further_ops}."
            )
        if self.passed:
            budget = "without a budget" if self._budget is None else f"with a budget of {self._budget:.1%}"
            notes.append(f"Watching took {self.spent / self.passed:.2%} of {self.passed:,.1f} s, {budget}.")
        return notes


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class WatchedNorm(NamedTuple):
    """Norm of one tensor in a watched step.

    tensor_name: "output 0", "gradient 1", or of an input: "parameter 0.weight".  value: on the device.
    """

    op: WatchedOp
    tensor_name: str
    is_input: bool
    value: Any


def raise_alarms(
    step: int, norms: Sequence[WatchedNorm], values: Sequence[float], threshold: float, window: int
) -> tuple[list[Alarm], int]:
    """Return alarms for the first NaN and the first spike of a step, and the number of further ones."""
    alarms: dict[str, Alarm] = {}
    followed = 0
    for norm, value in zip(norms, values, strict=True):
        op = norm.op
        kind: Kind
        distance = op.norms.setdefault(norm.tensor_name, NormHistory(window)).distance(value)
        op.last = value if not norm.is_input else op.last
        if value != value:
            kind, detail = "nan", f"{norm.tensor_name} is the first to hold NaN"
        elif distance > threshold:
            kind = "spike"
            median = op.norms[norm.tensor_name].median
            detail = (
                f"the norm of {norm.tensor_name} is {value:.4g}, {distance:.0f} deviations above {median:.4g}"
            )
        else:
            continue
        if norm.is_input:
            detail += ", an input of the op"
        if kind in alarms or "nan" in alarms:
            followed += 1
        else:
            alarms[kind] = Alarm(kind, step, op.phase, op.type, op.module, op.source, detail)
    return list(alarms.values()), followed

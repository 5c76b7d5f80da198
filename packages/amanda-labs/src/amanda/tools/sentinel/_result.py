"""Alarms: norms and differing ranks that raise them, and the result of the sentinel."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

from amanda.errors import AmandaError
from amanda.tools.kit import OpRecord
from amanda.tools.results import NOTHING, Column, Result, shortened
from amanda.tools.sentinel import _reruns

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
        op = f"{self.type} ({self.phase}){module}{source}: " if self.type else ""
        return f"{self.kind} in step {self.step}: {op}{self.detail}"


class SentinelError(AmandaError, RuntimeError, module="amanda.tools.sentinel"):
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

    def measure_and_add(self, norm: float) -> float:
        """Return how many deviations a norm is above the median of the norms before, and add the norm.

        0.0 while the norms are few, and for a norm of 0 or NaN, which is not added.
        """
        if norm == 0 or math.isnan(norm):
            return 0.0
        # Norms change by factors, as losses do, so distances are between logarithms.
        log_norm, logs = math.log(norm), self._logs
        distance = 0.0
        if len(logs) >= self.ENOUGH:
            # Medians, since one spike must not widen the band for the next.
            center = median(logs)
            # The factor makes the median deviation of normal numbers their standard deviation.
            spread = 1.4826 * median(abs(log - center) for log in logs) if math.isfinite(center) else 0.0
            distance = (log_norm - center) / max(spread, self.LEAST)
        logs.append(log_norm)
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

    def _facts(self) -> Mapping[str, Any]:
        """Return the alarms, counts and times."""
        return {
            "alarms": [asdict(alarm) for alarm in self.alarms], **asdict(self.counts), "left": self.left,
            "spent": self.spent, "passed": self.passed, "budget": self._budget, "dropped": self._dropped,
        }  # fmt: skip

    @property
    def _leading(self) -> int:
        """One: the answer."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return the answer, further alarms, comparisons, executions that did not run again, and the cost."""
        counts = self.counts
        if not (self.ops or counts.steps):
            return [NOTHING]
        notes = self._alarm_notes()
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

    def _alarm_notes(self) -> list[str]:
        """Return the first ten alarms, or that there is none, and the number of watched steps."""
        watched = f"{self.counts.watched:,} of {self.counts.steps:,} steps were watched"
        if not self.alarms:
            recomputed = sum(op.recomputed for op in self.ops)
            return [f"No alarm: {watched}, and {recomputed:,} executions that ran again gave the same bits."]
        num_further = len(self.alarms) - 1 + self._dropped
        further = f" There are {num_further:,} further alarms." if num_further else ""
        further_alarms = (f"{alarm}." for alarm in self.alarms[1:10])
        return [f"Alarm: {self.alarms[0]}.{further}", *further_alarms, f"{watched}."]


def _finite(value: float | None) -> float | None:
    """Return a number; None for NaN, an infinity or None, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


class WatchedNorm(NamedTuple):
    """Norm of one tensor in a watched step.

    tensor_name: "output 0", "gradient 1", or of an input: "parameter 0.weight".  value: on the device.
    """

    op: WatchedOp
    tensor_name: str
    is_input: bool
    value: Any


def norm_alarms(
    step: int, norms: Sequence[WatchedNorm], values: Sequence[float], threshold: float, window: int
) -> tuple[list[Alarm], int]:
    """Return alarms for the first NaN and the first spike of a step, and the number of further ones.

    Adds each value to the history of its tensor, and sets `last` of the ops.  No spike counts after the
    first NaN.
    """
    alarms: dict[str, Alarm] = {}
    further_count = 0
    for norm, value in zip(norms, values, strict=True):
        op = norm.op
        kind: Kind = "nan"
        history = op.norms.setdefault(norm.tensor_name, NormHistory(window))
        distance = history.measure_and_add(value)
        if not norm.is_input:
            op.last = value
        if math.isnan(value):
            detail = f"{norm.tensor_name} is the first to hold NaN"
        elif distance > threshold:
            kind = "spike"
            detail = (
                f"the norm of {norm.tensor_name} is {value:.4g}, {distance:.0f} deviations above "
                f"{history.median:.4g}"
            )
        else:
            continue
        if norm.is_input:
            detail += ", an input of the op"
        # One fault spreads to all later ops, so the first of a step is the one to name.
        if kind in alarms or "nan" in alarms:
            further_count += 1
        else:
            alarms[kind] = Alarm(kind, step, op.phase, op.type, op.module, op.source, detail)
    return list(alarms.values()), further_count


class Ranks:
    """Comparison of hashes of gradients and parameters over ranks, before an optimizer's step.

    The hashes travel through a separate process group; no rank waits for them before the next comparison.
    Each rank sends its interval, in steps, along with the hashes; the longest decides the next comparison.

    remarks: sentences on parameters that were not compared.  comparisons: number of comparisons.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self.comparisons = 0
        self.remarks: dict[str, None] = {}
        self._name_of = name_of
        self._next_step = 0  # at which the ranks compare
        self._interval = 1  # steps from one comparison to the next, which all ranks agreed on
        self._group: Any = None
        # The exchange under way: work of the collective, messages by rank, names of the hashes, step.
        self._exchange: tuple[Any, list[Any], list[str], int] | None = None

    def is_due(self, step: int) -> bool:
        """Return True for a step at which the ranks compare; False without ranks."""
        import torch.distributed as distributed

        if step < self._next_step or not (distributed.is_available() and distributed.is_initialized()):
            return False
        return distributed.get_world_size() > 1

    def send(self, step: int, parameters: Sequence[Any], wanted_interval: Callable[[], int]) -> list[Alarm]:
        """Receive the hashes sent before, then send new ones; return alarms for the received hashes.

        Sends nothing from now on if the ranks have different numbers of parameters, or none.
        wanted_interval: return the number of steps that this rank wants until the next comparison.
        """
        import torch
        import torch.distributed as distributed

        # The group takes one exchange at a time, and hashes of two steps must not mix.
        alarms = self.receive_alarms(wait=True)
        plain_parameters = [parameter for parameter in parameters if _reruns.is_plain(parameter)]
        skipped = len(parameters) - len(plain_parameters)
        if skipped:
            remark = f"{skipped} parameters are sharded, or no plain tensors: ranks do not compare them."
            self.remarks[remark] = None
        # A group of its own: collectives of the program and of the tool cannot get in each other's order.
        if self._group is None and not self._begin_group(len(plain_parameters)):
            self._next_step = 1 << 62  # never again
            return alarms
        hashes, names = [], []
        for parameter in plain_parameters:
            for kind, value in (("gradient", parameter.grad), ("parameter", parameter)):
                # A rank that lacks a gradient sends a zero: hashes are compared by place.
                has_hash = value is not None and _reruns.is_plain(value)
                hashes.append(_reruns.digest(value) if has_hash else torch.zeros((), dtype=torch.int64))
                names.append(f"{kind} {self._name_of(parameter)}")
        device = self._group_device()
        # All ranks must compare at the same step, so each sends its wish and all take the largest.
        interval = torch.tensor([wanted_interval()], device=device)
        message = torch.cat([interval, torch.stack([value.to(device) for value in hashes])])
        received = [torch.empty_like(message) for _ in range(distributed.get_world_size())]
        # Asynchronous: the training goes on while the hashes travel.
        work = distributed.all_gather(received, message, group=self._group, async_op=True)
        self._exchange = work, received, names, step
        self._next_step = step + self._interval
        return alarms

    def _begin_group(self, num_parameters: int) -> bool:
        """Make the process group; return True if all ranks have the same number of parameters, above 0.

        Keeps a remark where the numbers differ.
        """
        import torch
        import torch.distributed as distributed

        self._group = distributed.new_group()
        count = torch.tensor([num_parameters], device=self._group_device())
        counts_by_rank = [torch.empty_like(count) for _ in range(distributed.get_world_size())]
        distributed.all_gather(counts_by_rank, count, group=self._group)
        if len({int(rank_count) for rank_count in counts_by_rank}) > 1:
            self.remarks["The ranks hold different numbers of parameters, and were not compared."] = None
            return False
        return num_parameters > 0

    def _group_device(self) -> str:
        """Return the device on which the process group exchanges tensors."""
        import torch.distributed as distributed

        # NCCL has no collectives of tensors on the host.
        return "cuda" if distributed.get_backend(self._group) == "nccl" else "cpu"

    def receive_alarms(self, wait: bool = False) -> list[Alarm]:
        """Receive the hashes sent before, if they are there or `wait` is true; return alarms for these.

        The longest interval that a rank sent with them is that of the next comparison.
        """
        if self._exchange is None:
            return []
        import torch

        work, hashes, names, step = self._exchange
        if not wait and not work.is_completed():
            return []
        work.wait()
        self._exchange = None
        self.comparisons += 1
        # The first number of each rank is the interval that it wants, the others are hashes.
        values_by_rank = torch.stack(hashes).tolist()
        self._interval = max(values[0] for values in values_by_rank)
        return compare_hashes(step, [values[1:] for values in values_by_rank], names)


def compare_hashes(step: int, hashes: Sequence[Sequence[int]], names: Sequence[str]) -> list[Alarm]:
    """Return an alarm for each rank that differs from the majority, or one for all where there is none.

    hashes: a row for each rank.
    """
    names_by_rank: dict[int | None, list[str]] = {}  # that differ; the rank is None where no majority agrees
    for hashes_of_name, name in zip(zip(*hashes, strict=True), names, strict=True):
        (common_hash, votes), *other_hashes = Counter(hashes_of_name).most_common()
        if not other_hashes:
            continue
        # With two ranks, or a tie, nobody can tell which rank is wrong.
        has_majority = votes > len(hashes_of_name) / 2
        differing_ranks: list[int | None] = [None]
        if has_majority:
            differing_ranks = [
                rank for rank, rank_hash in enumerate(hashes_of_name) if rank_hash != common_hash
            ]
        for rank in differing_ranks:
            names_by_rank.setdefault(rank, []).append(name)
    alarms = []
    for rank, differing_names in names_by_rank.items():
        verdict = f"rank {rank} differs from the other ranks" if rank is not None else "the ranks differ"
        first_name = differing_names[0]
        _, module = first_name.split(" ", 1)  # a name is "gradient PATH" or "parameter PATH"
        detail = (
            f"{verdict} in {len(differing_names)} of {len(names)} gradients and parameters, "
            f"first {first_name}"
        )
        alarms.append(
            Alarm("ranks", step, phase="optimizer", type="", module=module, source="", detail=detail)
        )
    return alarms

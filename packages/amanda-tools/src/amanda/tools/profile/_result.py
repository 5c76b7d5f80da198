"""Results of a profile: a row for each op, module, type, phase or kernel; peaks; the timeline."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from amanda.tools.profile import _trace
from amanda.tools.profile._recorder import Recorder, floor
from amanda.tools.profile._records import KEYS, OLDER, OpProfile, Peak, Timeline, events_of, summed
from amanda.tools.results import NOTHING, Column, KeyedResult, Result, amount, check_schema, count_of, made_of

MS = 1e-6
"""Milliseconds of a nanosecond."""

milliseconds = "{:,.3f}".format
bytes_text = partial(amount, unit="B")

_ms_column = partial(Column, show=milliseconds, number=True, unit="ms")
_TREE_COLUMNS = (
    Column("calls", show="{:,}".format, number=True, priority=-1), _ms_column("self ms"),
    _ms_column("total ms", priority=3), _ms_column("forward ms"), _ms_column("backward ms"),
    Column("share", show="{:.1%}".format, number=True, unit="share", priority=4),
    Column("allocated", show=bytes_text, number=True, unit="B"),
)  # fmt: skip


def _self_time(places: Iterable[OpProfile], phase: str | None = None) -> int:
    """Return the nanoseconds in ops of a phase, or of all, without those in ops within."""
    # Self time, as the total of an outer op has that of the ops within.
    return sum(op.own for op in places if phase in (None, op.phase))


class KernelResult(Result):
    """Kernels on a GPU, and operators of ATen on a CPU, by the op that ran them."""

    name: ClassVar[str] = "profile.kernels"
    title = "Kernels"
    columns: ClassVar[Sequence[Column]] = (
        *map(Column, KEYS), Column("kernel", priority=7), Column("device"),
        Column("calls", show="{:,}".format, total=True),
        Column("ms", show=milliseconds, total=True, priority=1),
    )  # fmt: skip

    def __init__(self, places: Sequence[OpProfile], obstacle: str = "") -> None:
        self.ops = tuple(places)
        self._obstacle = obstacle

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each kernel of each op, most time first."""
        calls, nanoseconds = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for op in self.ops:
            for kernel, (kernel_calls, kernel_nanoseconds) in op.kernels.items():
                key = (*op.names.values(), *kernel)
                calls[key] += kernel_calls
                nanoseconds[key] += kernel_nanoseconds
        return [(*key, calls[key], MS * time) for key, time in nanoseconds.most_common()]

    def notes(self) -> Sequence[str]:
        """Return a sentence on the times, or the reason why there are none."""
        if self._obstacle:
            return [f"There are no kernels: {self._obstacle}."]
        if not any(op.kernels for op in self.ops):
            return ["There are no kernels: ProfileTool(kernels=True) records them with torch.profiler."]
        return [
            "Rows are kernels on a GPU, and operators of ATen on a CPU, without the time of operators within."
        ]


_FILE_NAMES = {
    "calls": "calls", "timed": "timed", "total": "total_ns", "own": "self_ns", "least": "min_ns",
    "most": "max_ns", "device": "device_ns", "allocated": "allocated", "at_peak": "at_peak",
}  # fmt: skip
"""Names in files of the fields of an op."""


@dataclass(eq=False, repr=False)
class ProfileResult(KeyedResult):
    """Times and bytes of ops.

    ops: the profile of each op.  peaks: of each device whose memory was recorded.
    timeline: for traces.  wall_ns: sum over recorded steps, from the first op of each to its last.
    schedule: in words.  obstacle: why `kernels=True` gave no kernels.
    row_keys: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "profile"
    keys: ClassVar[Sequence[str]] = KEYS
    _counted: ClassVar[Sequence[Column]] = (
        Column("calls", show="{:,}".format, total=True, priority=1),
        _ms_column("total ms", folded="sum", priority=-1),
        Column("self ms", show=milliseconds, total=True, unit="ms", priority=3),
        Column("mean us", show="{:,.1f}".format, number=True, unit="us", folded="mean"),
        Column("share", show="{:.1%}".format, number=True, unit="share", folded="sum", priority=2),
        _ms_column("device ms", folded="sum"), Column("allocated", show=bytes_text, total=True, unit="B"),
        Column("at peak", show=bytes_text, total=True, unit="B"),
    )  # fmt: skip
    _order: ClassVar[str] = "self ms"

    ops: Sequence[OpProfile]
    peaks: Sequence[Peak] = ()
    timeline: Timeline = field(default_factory=Timeline)
    recorded_steps: int = 0
    wall_ns: int = 0
    schedule: str = "all"
    obstacle: str = ""
    row_keys: Sequence[str] = KEYS

    def __post_init__(self) -> None:
        self._set_keys(self.row_keys, "Profile")

    @classmethod
    def of(cls, recorder: Recorder, obstacle: str = "") -> ProfileResult:
        """Return a copy of the records of a recorder, which may go on.

        Args:
            recorder: The recorder.
            obstacle: Why there are no kernels, in words; "" without a reason.
        """
        log, accounts = recorder.log, recorder.storages.accounts()
        executions, (steps, step_count, duration) = log.numbers(), log.steps()
        recorder.collect()
        # Last: ops of other threads may go on, and what was read above belongs to these.
        ops = [summed([op]) for op in list(recorder.profiles.values())]
        peaks, alive = [], {}
        for device, peak, older_bytes, bytes_by_owner, history in accounts:
            numbers = iter(array("q", history))
            # Older bytes were alive before the first change, so every point of the history has all of them.
            alive[device] = [(when, size + older_bytes) for when, size in zip(numbers, numbers, strict=True)]
            if peak > 0:
                # Parameters and older tensors are not ops, and have no number.
                owners = [(ops[number] if number >= 0 else replace(OLDER), size)
                          for number, size in bytes_by_owner.items()]  # fmt: skip
                for owner, size in owners:
                    owner.at_peak += size
                peaks.append(Peak(device, peak, sorted(owners, key=lambda item: -item[1])))
        timeline = Timeline(events_of(executions, ops), dict(log.threads), steps, alive, log.dropped)
        executed = [op for op in ops if op.calls]
        return cls(executed, peaks, timeline, step_count, duration, str(recorder.schedule), obstacle)

    def kernels(self) -> KernelResult:
        """Return a row for each kernel of each op, if the tool has `kernels=True`."""
        return KernelResult(self.ops, self.obstacle)

    def tree(self, depth: int | None = None) -> Result:
        """Return a row for each module: the time of its own ops, and that with the modules within.

        Args:
            depth: Levels of modules below the model; None for as many as a screen shows.
        """
        time_of_all = _self_time(self.ops)

        def numbers_of_node(node: Any) -> Sequence[Any]:
            """Return the cells of a module's row, in the order of `_TREE_COLUMNS`."""
            ops = list(node.all_ops())
            total, sums = _self_time(ops), summed(ops)
            times = (_self_time(node.ops), total, _self_time(ops, "forward"), _self_time(ops, "backward"))
            share = total / time_of_all if time_of_all else 0.0
            return sums.calls, *(MS * time for time in times), share, sums.allocated

        return self._tree(depth, _TREE_COLUMNS, numbers_of_node)

    def total(self, phase: str | None = None) -> float:
        """Return milliseconds in ops of one phase, or of all; ops within ops count once."""
        return MS * _self_time(self.ops, phase)

    @property
    def wall(self) -> float:
        """Milliseconds of the recorded steps, from the first op of each to its last."""
        return MS * self.wall_ns

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, most self time first."""
        total_ns = _self_time(self.ops)
        groups = self._grouped(self.ops)
        rows = [(*key, *_numbers_of_row(summed(ops), total_ns)) for key, ops in groups.items()]
        self_time_position = len(self._by) + 2  # the third number behind the keys
        return sorted(rows, key=lambda row: -(row[self_time_position] or 0))

    def _facts(self) -> Mapping[str, Any]:
        """Return totals, steps, peaks with their owners, and each op in nanoseconds."""
        return {
            "by": self._by,
            "steps": [{"step": step.number, "ms": MS * (step.end - step.begin)}
                      for step in self.timeline.steps],
            "wall_ms": self.wall,
            "totals_ms": {phase: self.total(phase) for phase in dict.fromkeys(op.phase for op in self.ops)},
            "executions": {"kept": len(self.timeline.events), "dropped": self.timeline.dropped},
            "schedule": self.schedule, "recorded_steps": self.recorded_steps, "wall_ns": self.wall_ns,
            "peaks": [
                {"device": peak.device, "bytes": peak.size,
                 "owners": [{**_names_in_file(owner), "bytes": size} for owner, size in peak.owners]}
                for peak in self.peaks
            ],
            "places": [
                {**_names_in_file(op), **{name: getattr(op, field) for field, name in _FILE_NAMES.items()}}
                for op in self.ops
            ],
        }  # fmt: skip

    def merged(self, *profiles: ProfileResult) -> ProfileResult:
        """Return the sum of this profile and those of other runs or ranks, with the timeline of this one."""
        results = (self, *profiles)
        ops_by_names: dict[tuple[str, ...], list[OpProfile]] = {}
        # Timelines of several runs have clocks of their own, and are not merged.
        for op in (op for result in results for op in result.ops):
            ops_by_names.setdefault((*op.names.values(), op.name), []).append(op)
        return replace(
            self, ops=list(map(summed, ops_by_names.values())),
            peaks=[peak for result in results for peak in result.peaks],
            recorded_steps=sum(result.recorded_steps for result in results),
            wall_ns=sum(result.wall_ns for result in results), row_keys=self._by,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ProfileResult:
        """Return the result of a dict from `to_dict`, without timeline; raise ValueError for other dicts."""
        check_schema(content, cls.name, cls.version)
        peaks = []
        for peak in content["peaks"]:
            owners = [(_op_from_dict(owner), owner["bytes"]) for owner in peak["owners"]]
            peaks.append(Peak(peak["device"], peak["bytes"], owners))
        return cls(
            list(map(_op_from_dict, content["places"])), peaks, recorded_steps=content["recorded_steps"],
            wall_ns=content["wall_ns"], schedule=content["schedule"], row_keys=content["by"],
        )  # fmt: skip

    @property
    def _leading(self) -> int:
        return 1 + len(self.peaks)

    def notes(self) -> Sequence[str]:
        """Return sentences on times, peaks, and executions without time or outside of the timeline."""
        total_ms, steps, dropped = self.total(), self.recorded_steps, self.timeline.dropped
        notes = [] if self.ops else [NOTHING]
        if self.ops:
            share = f", {total_ms / self.wall:.0%}" if self.wall else ""
            notes.append(
                f"Ops took {total_ms:,.3f} ms of {self.wall:,.3f} ms in "
                f"{count_of(steps, 'recorded step')}{share}. The time of tools is excluded, except for "
                f"{floor() / 1000:.2f} us per op."
            )
        notes += [f"{str(peak)[0].upper()}{str(peak)[1:]}." for peak in self.peaks]
        untimed = sum(op.calls - op.timed for op in self.ops)
        if untimed:
            notes.append(f"No time for {count_of(untimed, 'execution')}: no input marks their begin.")
        if self.obstacle:
            notes.append(f"torch.profiler recorded no kernels: {self.obstacle}.")
        if dropped:
            length = len(self.timeline.events)
            notes.append(
                f"The timeline has the first {length:,} executions; {dropped:,} more are in the table only. "
                "Raise `limit` for a longer timeline."
            )
        return notes

    def to_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return _trace.trace(self.timeline)

    def save(self, path: str | Path) -> Path:
        """Write the result in the format of the suffix.

        `trace.json` or `step.trace.json.gz` is the timeline.  Raises AmandaError for an unknown suffix.
        """
        path = Path(path)
        if _trace.is_trace_name(path):
            return _trace.write(self.to_trace(), path)
        return super().save(path)

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write the timeline for the PyTorch profiler plugin of TensorBoard; return the file."""
        return _trace.write(self.to_trace(), _trace.tensorboard_file(Path(folder)))


def _numbers_of_row(sums: OpProfile, total_ns: int) -> tuple[Any, ...]:
    """Return the numbers of a row, behind its keys.  sums: of its ops.  total_ns: of all ops."""
    is_timed = sums.timed > 0
    return (
        sums.calls, MS * sums.total if is_timed else None, MS * sums.own if is_timed else None,
        sums.total / sums.timed / 1000 if is_timed else None, sums.own / total_ns if total_ns else 0.0,
        None if sums.device is None else MS * sums.device, sums.allocated, sums.at_peak or None,
    )  # fmt: skip


def _names_in_file(op: OpProfile) -> dict[str, str]:
    """Return the names and ids of an op as files have them; "of" is the id of the forward op."""
    return {**op.about, "of": f"{op.op_id:016x}"}


def _op_from_dict(content: Mapping[str, Any]) -> OpProfile:
    """Return the profile that a file has of an op, or, without numbers, of an owner of bytes at a peak."""
    texts = {key: content[key] for key in (*KEYS, "name")}
    numbers = {field: content[name] for field, name in _FILE_NAMES.items() if name in content}
    ids = {"id": int(content["id"], 16), "op_id": int(content["of"], 16)}
    return made_of(OpProfile, {**texts, **ids, **numbers})

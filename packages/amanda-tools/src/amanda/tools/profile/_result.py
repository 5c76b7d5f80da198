"""The result of a profile: a row for each op, or for each module, type or phase; the peak; the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from amanda.tools.profile import _trace
from amanda.tools.profile._kernels import KernelResult
from amanda.tools.profile._log import Timeline
from amanda.tools.profile._memory import Peak
from amanda.tools.profile._modules import MS, ModuleResult, milliseconds, size
from amanda.tools.profile._op import KEYS, OpProfile, together
from amanda.tools.profile._recorder import Recorder, floor
from amanda.tools.results import NOTHING, Column, KeyedResult, check_schema, made_of

_columns = (
    Column("calls", show="{:,}".format, total=True),
    Column("total ms", show=milliseconds, number=True, unit="ms", folded="sum"),
    Column("self ms", show=milliseconds, total=True, unit="ms"),
    Column("mean us", show="{:,.1f}".format, number=True, unit="us", folded="mean"),
    Column("share", show="{:.1%}".format, number=True, unit="share", folded="sum"),
    Column("device ms", show=milliseconds, number=True, unit="ms", folded="sum"),
    Column("allocated", show=size, total=True, unit="B"),
    Column("at peak", show=size, total=True, unit="B"),
)


_NUMBERS = {
    "calls": "calls", "timed": "timed", "total": "total_ns", "own": "self_ns", "least": "min_ns",
    "most": "max_ns", "device": "device_ns", "allocated": "allocated", "at_peak": "at_peak",
}  # fmt: skip
"""Names in files of the fields of an op."""


@dataclass(eq=False, repr=False)
class ProfileResult(KeyedResult):
    """Times and bytes of all records up to a moment.

    places: the profile of each op.  peaks: of each device whose memory was followed.
    timeline: for traces.  wall_ns: sum over recorded steps, from the first op of each to its last.
    schedule: in words.  obstacle: why the kernels that were asked for are not known.
    told_by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "profile"
    keys: ClassVar[Sequence[str]] = KEYS
    counted: ClassVar[Sequence[Column]] = _columns
    width: ClassVar[int] = 36
    order: ClassVar[str] = "self ms"

    places: Sequence[OpProfile]
    peaks: Sequence[Peak] = ()
    timeline: Timeline = field(default_factory=Timeline)
    recorded_steps: int = 0
    wall_ns: int = 0
    schedule: str = "all"
    obstacle: str = ""
    told_by: Sequence[str] = KEYS

    def __post_init__(self) -> None:
        self.tell_by(self.told_by, "Profile")

    @classmethod
    def of(cls, recorder: Recorder, obstacle: str = "") -> ProfileResult:
        """Return the present records of a recorder, copied."""
        kept = {place: together([place]) for place in recorder.places.values()}
        places, log, devices = list(kept.values()), recorder.log, recorder.memory.devices.values()
        peaks = []
        for peak in (device.at_peak() for device in devices if device.peak):
            owners = [(kept.get(owner) or together([owner]), held) for owner, held in peak.owners]
            peaks.append(replace(peak, owners=owners))
            for owner, held in owners:
                owner.at_peak += held
        # given bytes count from the beginning
        alive = {one.name: [(when, held + one.given) for when, held in one.history] for one in devices}
        steps, count, spent = log.steps()
        timeline = Timeline(log.events(places), dict(log.threads), steps, alive, log.dropped)
        measured = [place for place in places if place.calls]
        return cls(measured, peaks, timeline, count, spent, str(recorder.schedule), obstacle)

    def kernels(self) -> KernelResult:
        """Return a row for each kernel of each op, if the tool was made with `kernels`."""
        return KernelResult(self.places, self.obstacle)

    def modules(self) -> ModuleResult:
        """Return a row for each module, without and with the modules in it."""
        return ModuleResult(self.places)

    def total(self, phase: str | None = None) -> float:
        """Return milliseconds in ops of one phase, or of all; ops within ops count once."""
        return MS * sum(place.own for place in self.places if phase in (None, place.phase))

    @property
    def wall(self) -> float:
        """Milliseconds of the recorded steps, from the first op of each to its last."""
        return MS * self.wall_ns

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, those with most own time first."""
        whole = sum(place.own for place in self.places)
        rows = [(*key, *_row(together(places), whole)) for key, places in self.grouped(self.places).items()]
        own = len(self._by) + 2
        return sorted(rows, key=lambda row: -(row[own] or 0))

    def facts(self) -> Mapping[str, Any]:
        """Return totals, steps, peaks with their owners, and each op in nanoseconds."""
        return {
            "by": self._by,
            "steps": [{"step": one.number, "ms": MS * (one.end - one.begin)} for one in self.timeline.steps],
            "wall_ms": self.wall,
            "totals_ms": {
                phase: self.total(phase) for phase in dict.fromkeys(place.phase for place in self.places)
            },
            "executions": {"kept": len(self.timeline.events), "dropped": self.timeline.dropped},
            "schedule": self.schedule,
            "recorded_steps": self.recorded_steps,
            "wall_ns": self.wall_ns,
            "peaks": [
                {"device": peak.device, "bytes": peak.size,
                 "owners": [{**_named(place), "bytes": held} for place, held in peak.owners]}
                for peak in self.peaks
            ],
            "places": [
                {**_named(place), **{name: getattr(place, field) for field, name in _NUMBERS.items()}}
                for place in self.places
            ],
        }  # fmt: skip

    def merged(self, *others: ProfileResult) -> ProfileResult:
        """Return this and other runs or ranks as one: equal ops add up, and the timeline is this one's."""
        results = (self, *others)
        equal: dict[tuple[str, ...], list[OpProfile]] = {}
        for place in (one for result in results for one in result.places):
            equal.setdefault((*place.names.values(), place.name), []).append(place)
        return replace(
            self,
            places=list(map(together, equal.values())),
            peaks=[peak for result in results for peak in result.peaks],
            recorded_steps=sum(result.recorded_steps for result in results),
            wall_ns=sum(result.wall_ns for result in results),
            told_by=self._by,
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ProfileResult:
        """Return the result that `to_dict` described, without timeline; raise ValueError for others."""
        check_schema(found, cls.name, cls.version)
        peaks = [
            Peak(peak["device"], peak["bytes"], [(_place(one), one["bytes"]) for one in peak["owners"]])
            for peak in found["peaks"]
        ]
        return cls(
            list(map(_place, found["places"])), peaks, recorded_steps=found["recorded_steps"],
            wall_ns=found["wall_ns"], schedule=found["schedule"], told_by=found["by"],
        )  # fmt: skip

    @property
    def leading(self) -> int:
        """The times and the peaks come first."""
        return 1 + len(self.peaks)

    def notes(self) -> Sequence[str]:
        """Return sentences on the times, the peaks, and executions that the table or the timeline lacks."""
        ops, steps, dropped = self.total(), self.recorded_steps, self.timeline.dropped
        notes = [] if self.places else [NOTHING]
        if self.places:
            share = f", {ops / self.wall:.0%}" if self.wall else ""
            notes.append(
                f"Ops took {ops:,.3f} ms of {self.wall:,.3f} ms in {steps} recorded "
                f"step{'s' if steps != 1 else ''}{share}; an op that does nothing would show "
                f"{floor() / 1000:.2f} us. Routines of tools are not in these times."
            )
        notes += [f"{str(peak)[0].upper()}{str(peak)[1:]}." for peak in self.peaks]
        untimed = sum(place.calls - place.timed for place in self.places)
        if untimed:
            notes.append(f"{untimed:,} executions have no time: no value goes into them.")
        if self.obstacle:
            notes.append(f"torch.profiler did not tell kernels: {self.obstacle}.")
        if dropped:
            kept = len(self.timeline.events)
            notes.append(
                f"The timeline has the first {kept:,} executions, {dropped:,} more are in the sums "
                "alone; `limit` says how many are kept."
            )
        return notes

    def to_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return _trace.trace(self.timeline)

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names.

        A name such as `trace.json` or `step.trace.json.gz` means the timeline.  Raises AmandaError for a
        suffix that names no form.
        """
        path = Path(path)
        if _trace.is_meant(path):
            return _trace.write(self.to_trace(), path)
        return super().save(path)

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write the timeline for the PyTorch profiler plugin of TensorBoard; return the file."""
        return _trace.write(self.to_trace(), _trace.tensorboard_file(Path(folder)))


def _row(place: OpProfile, whole: int) -> tuple[Any, ...]:
    """Return the numbers of a row.  whole: nanoseconds of all ops."""
    is_timed = place.timed > 0
    return (
        place.calls,
        MS * place.total if is_timed else None,
        MS * place.own if is_timed else None,
        place.total / place.timed / 1000 if is_timed else None,
        place.own / whole if whole else 0.0,
        None if place.device is None else MS * place.device,
        place.allocated,
        place.at_peak or None,
    )


def _named(place: OpProfile) -> dict[str, str]:
    return {**place.about, "of": f"{place.op_id:016x}"}


def _place(found: Mapping[str, Any]) -> OpProfile:
    names = {key: found[key] for key in (*KEYS, "name")}
    numbers = {field: found[name] for field, name in _NUMBERS.items() if name in found}
    ids = {"id": int(found["id"], 16), "op_id": int(found["of"], 16)}
    return made_of(OpProfile, {**names, **ids, **numbers})

"""The result of a profile: a row for each op, or for each module, type or phase; the peak; the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.profile import _trace
from amanda.tools.profile._exchange import as_dict, from_dict, merged
from amanda.tools.profile._kernels import KernelResult
from amanda.tools.profile._modules import MS, ModuleResult, milliseconds, size
from amanda.tools.profile._place import KEYS, Place
from amanda.tools.profile._recorder import floor
from amanda.tools.profile._recording import Recording
from amanda.tools.results import Column, KeyedResult, check_schema

if TYPE_CHECKING:
    pass


_columns = (
    Column("calls", show="{:,}".format, total=True),
    Column("total ms", show=milliseconds, number=True, unit="ms"),
    Column("self ms", show=milliseconds, total=True, unit="ms"),
    Column("mean us", show="{:,.1f}".format, number=True, unit="us"),
    Column("share", show="{:.1%}".format, number=True, unit="share"),
    Column("device ms", show=milliseconds, number=True, unit="ms"),
    Column("allocated", show=size, total=True, unit="B"),
    Column("at peak", show=size, total=True, unit="B"),
)


class ProfileResult(KeyedResult):
    """Times and bytes of everything that was recorded.

    places: what was measured, each op apart.  peaks: of each device whose memory was followed.
    timeline: for traces.  by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "profile"
    keys: ClassVar[Sequence[str]] = KEYS
    counted: ClassVar[Sequence[Column]] = _columns
    width: ClassVar[int] = 36

    def __init__(self, recording: Recording, by: Sequence[str] = KEYS) -> None:
        self._recording = recording
        self.places = tuple(place for place in recording.places if place.calls)
        self.peaks = tuple(recording.peaks)
        self.timeline = recording.timeline
        self.tell_by(by, "Profile")

    def kernels(self) -> KernelResult:
        """A row for each kernel of each op, where the tool was asked for them."""
        return KernelResult(self.places, self._recording.obstacle)

    def modules(self) -> ModuleResult:
        """A row for each module, with its own ops and with those of the modules in it."""
        return ModuleResult(self.places)

    def total(self, phase: str | None = None) -> float:
        """Milliseconds in ops of one phase, or of all; ops within ops count once."""
        return MS * sum(place.own for place in self.places if phase in (None, place.phase))

    @property
    def wall(self) -> float:
        """Milliseconds that the recorded steps took, from the first op of each to its last."""
        return MS * self._recording.wall

    def rows(self) -> Sequence[Sequence[Any]]:
        """Rows by their keys, those with most time of their own first."""
        at_peak = self._at_peak()
        whole = sum(place.own for place in self.places)
        rows = [(*key, *_sums(places, whole, at_peak)) for key, places in self.grouped(self.places).items()]
        own = len(self._by) + 2
        return sorted(rows, key=lambda row: -(row[own] or 0))

    def _at_peak(self) -> dict[int, int]:
        """Bytes at the peaks by the identity of their place."""
        found: dict[int, int] = {}
        for peak in self.peaks:
            for place, held in peak.owners:
                found[id(place)] = found.get(id(place), 0) + held
        return found

    def facts(self) -> Mapping[str, Any]:
        """Totals, steps, peaks with their owners, and each op in nanoseconds."""
        return {
            "by": self._by,
            "steps": [{"step": one.number, "ms": MS * (one.end - one.begin)} for one in self.timeline.steps],
            "wall_ms": self.wall,
            "totals_ms": {phase: self.total(phase) for phase in _phases(self.places)},
            "executions": {"kept": len(self.timeline.events), "dropped": self.timeline.dropped},
            **as_dict(self._recording, self._at_peak()),
        }

    def merged(self, *others: ProfileResult) -> ProfileResult:
        """This and other runs or ranks as one: equal ops add up, peaks stay; the timeline is this one's."""
        return ProfileResult(merged([self._recording, *(one._recording for one in others)]), self._by)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ProfileResult:
        """Return what `to_dict` described, without timeline; raises ValueError for another schema."""
        check_schema(found, cls.name, cls.version)
        return cls(from_dict(found), found["by"])

    def notes(self) -> Sequence[str]:
        """Return what the times measure, the peaks, and what is not in the table."""
        ops, steps, dropped = self.total(), self._recording.steps, self.timeline.dropped
        notes = []
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
        if self._recording.obstacle:
            notes.append(f"torch.profiler did not tell kernels: {self._recording.obstacle}.")
        if dropped:
            kept = len(self.timeline.events)
            notes.append(
                f"The timeline has the first {kept:,} executions, {dropped:,} more are in the sums "
                "alone; `limit` says how many are kept."
            )
        return notes

    def to_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return _trace.trace(self.timeline)

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names.

        A name such as `trace.json` or `step.trace.json.gz` is for the timeline.  Raises AmandaError for a
        suffix that names no form.
        """
        path = Path(path)
        if _trace.is_meant(path):
            return _trace.write(self.to_trace(), path)
        return super().save(path)

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write the timeline as the PyTorch profiler plugin of TensorBoard reads it; the file."""
        return _trace.write(self.to_trace(), _trace.tensorboard_file(Path(folder)))


def _sums(places: Sequence[Place], whole: int, at_peak: Mapping[int, int]) -> tuple[Any, ...]:
    timed, own = sum(place.timed for place in places), sum(place.own for place in places)
    total = sum(place.total for place in places)
    device = [place.device for place in places if place.device is not None]
    allocated = [place.allocated for place in places if place.allocated is not None]
    held = [at_peak[id(place)] for place in places if id(place) in at_peak]
    return (
        sum(place.calls for place in places),
        MS * total if timed else None,
        MS * own if timed else None,
        total / timed / 1000 if timed else None,
        own / whole if whole else 0.0,
        MS * sum(device) if device else None,
        sum(allocated) if allocated else None,
        sum(held) if held else None,
    )


def _phases(places: Iterable[Place]) -> Iterable[str]:
    return dict.fromkeys(place.phase for place in places)

"""A recording up to a moment, which does not change any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from amanda.tools.profile._log import Event, Thread
from amanda.tools.profile._memory import Memory
from amanda.tools.profile._place import Place
from amanda.tools.profile._recorder import Recorder
from amanda.tools.profile._schedule import Step
from amanda.tools.results import amount


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive on a device at once, and by which ops they were made, most first."""

    device: str
    size: int
    owners: Sequence[tuple[Place, int]]

    def __str__(self) -> str:
        first = ", ".join(
            f"{amount(size, 'B')} {place.type}{f' in {place.module}' if place.module else ''}"
            + ("" if place.phase == "given" else f" ({place.phase})")
            for place, size in self.owners[:3]
        )
        return f"peak of {amount(self.size, 'B')} on {self.device}: {first}"


@dataclass(frozen=True)
class Timeline:
    """Data of a trace: executions by their begin, threads, recorded steps, and bytes alive by device.

    dropped: executions that are not in it.
    """

    events: Sequence[Event] = ()
    threads: Mapping[int, Thread] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    alive: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    dropped: int = 0


@dataclass(frozen=True)
class Recording:
    """Places, peaks of memory and the timeline.

    steps: how many were recorded, which took `wall` nanoseconds from the first op of each to its last.
    schedule: what was asked for, in words.  obstacle: why kernels are not told though they were asked for.
    """

    places: Sequence[Place]
    peaks: Sequence[Peak] = ()
    timeline: Timeline = field(default_factory=Timeline)
    steps: int = 0
    wall: int = 0
    schedule: str = "all"
    obstacle: str = ""

    @classmethod
    def of(cls, recorder: Recorder, obstacle: str = "") -> Recording:
        """Return a copy of what a recorder has now."""
        kept = {
            place: replace(place, kernels={name: list(sums) for name, sums in place.kernels.items()})
            for place in recorder.places.values()
        }
        places, windows, log = list(kept.values()), recorder.windows, recorder.log
        timeline = Timeline(
            sorted(log.events(places), key=lambda event: (event.begin, -event.took)), dict(log.threads),
            list(windows.steps), _alive(recorder.memory), log.dropped,
        )  # fmt: skip
        peaks = _peaks(recorder.memory, kept)
        return cls(places, peaks, timeline, windows.count, windows.spent, str(recorder.schedule), obstacle)


def _peaks(memory: Memory | None, kept: Mapping[Place, Place]) -> list[Peak]:
    peaks = []
    for device in memory.devices.values() if memory is not None else ():
        if device.peak:
            owners = sorted(device.at_peak().items(), key=lambda item: -item[1])
            peaks.append(Peak(device.name, device.peak, [(kept.get(one, one), size) for one, size in owners]))
    return peaks


def _alive(memory: Memory | None) -> dict[str, list[tuple[int, int]]]:
    """Bytes alive after each change; what was given is there from the beginning."""
    devices = memory.devices.values() if memory is not None else ()
    return {one.name: [(when, size + one.given) for when, size in one.history] for one in devices}

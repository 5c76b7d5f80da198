"""Kernels on a GPU, by CUPTI, and ATen's operators on a CPU, as torch.profiler sees them in each op."""

from __future__ import annotations

from _thread import get_ident
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import amanda
from amanda.tools.profile._modules import MS, milliseconds
from amanda.tools.profile._place import KEYS, Place
from amanda.tools.profile._recorder import Recorder, Routines
from amanda.tools.results import Column, Result, shortened

RANGE = "amanda: "


class Kernels:
    """Lets torch.profiler run while steps are recorded, with a range around each op; no stream waits for it.

    obstacle: why it does not run; empty where it does.
    """

    def __init__(self) -> None:
        self.obstacle = ""
        self._profiler: Any = None
        self._thread = 0
        self._ranges: defaultdict[int, list[tuple[Place, Any]]] = defaultdict(list)

    def around(self, routines: Routines, place: Place, recorder: Recorder) -> Routines:
        """Routines that put an op into a range besides; the range is not in the times."""
        began, ended = routines

        @amanda.innermost
        def begin() -> None:
            if recorder.recording:
                self._enter(place)
            began()

        @amanda.innermost
        def end() -> None:
            ended()
            self._leave(place)

        return begin, end

    def stop(self, places: Sequence[Place]) -> None:
        """End the profile that runs, if any, and give each op what was seen in its ranges."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._ranges.clear()
        if get_ident() != self._thread:
            self.obstacle = "the profile was asked for on another thread than it was begun on"
            return
        profiler.stop()
        for index, kernel, device, took in seen(profiler.events() or ()):
            if index < len(places):
                counted = places[index].kernels.setdefault((kernel, device), [0, 0])
                counted[0] += 1
                counted[1] += took

    def _enter(self, place: Place) -> None:
        if self._profiler is None and not self._start():
            return
        import torch

        handle = torch.ops.profiler._record_function_enter_new(f"{RANGE}{place.index}", None)
        self._ranges[get_ident()].append((place, handle))

    def _leave(self, place: Place) -> None:
        ranges = self._ranges.get(get_ident(), [])
        if not any(one is place for one, _ in ranges):
            return
        import torch

        while ranges:  # what an op that raised has left open is within this one
            one, handle = ranges.pop()
            torch.ops.profiler._record_function_exit._RecordFunction(handle)
            if one is place:
                return

    def _start(self) -> bool:
        import torch

        enabled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if enabled and not self.obstacle:  # a second one would end the first
            self.obstacle = "a profile was running already"
        if self.obstacle:
            return False
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._thread = get_ident()
        return True


def seen(events: Iterable[Any]) -> Iterator[tuple[int, str, str, int]]:
    """For each kernel, or operator on a CPU, the number of the innermost range around it, its name, its
    device, and its nanoseconds without those within it.
    """
    for event in events:
        index = _range_of(event)
        if index is None:
            continue
        for kernel in event.kernels:
            yield index, kernel.name, f"cuda:{kernel.device}", round(1000 * kernel.duration)
        if event.name.startswith("aten::"):
            yield index, event.name, "cpu", round(1000 * event.self_cpu_time_total)


def _range_of(event: Any) -> int | None:
    around = event.cpu_parent
    while around is not None:
        if around.name.startswith(RANGE):
            return int(around.name.removeprefix(RANGE))
        around = around.cpu_parent
    return None


class KernelResult(Result):
    """Kernels and operators by the ops that they are part of."""

    name: ClassVar[str] = "profile.kernels"
    title = "Kernels"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(key, show=partial(shortened, width=32)) for key in KEYS),
        Column("kernel", show=partial(shortened, width=48)),
        Column("device"),
        Column("calls", show="{:,}".format, total=True),
        Column("ms", show=milliseconds, total=True),
    )

    def __init__(self, places: Sequence[Place], obstacle: str = "") -> None:
        self.places = tuple(places)
        self._obstacle = obstacle

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each kernel of each op, those with most time first."""
        found: dict[tuple[str, ...], list[int]] = {}
        for place in self.places:
            for kernel, (calls, took) in place.kernels.items():
                sums = found.setdefault((*place.names.values(), *kernel), [0, 0])
                sums[0] += calls
                sums[1] += took
        rows = [(*key, calls, MS * took) for key, (calls, took) in found.items()]
        return sorted(rows, key=lambda row: -row[-1])

    def notes(self) -> Sequence[str]:
        """Return what the times measure, and why there are none."""
        if self._obstacle:
            return [f"torch.profiler did not tell: {self._obstacle}."]
        if not any(place.kernels for place in self.places):
            return ["ProfileTool(kernels=True) lets torch.profiler run, which tells; here nothing was told."]
        return ["On a CPU operators of ATen, without those within them; on a GPU kernels."]

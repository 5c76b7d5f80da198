"""Kernels on a GPU and ATen's operators on a CPU, which torch.profiler finds in each op."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda.tools.profile._modules import MS, milliseconds
from amanda.tools.profile._op import KEYS, OpProfile
from amanda.tools.results import Column, Result, shortened

RANGE = "amanda: "


class Kernels:
    """Runner of torch.profiler in recorded steps, with a range around each op and no synchronisation.

    obstacle: why torch.profiler does not run; "" if it does.
    """

    def __init__(self) -> None:
        self.obstacle = ""
        self._profiler: Any = None
        self._thread = 0

    def begin(self, place: OpProfile) -> Any:
        """Return the range of an op, which ends if it is dropped; None if torch.profiler cannot run."""
        if self._profiler is None and not self._start():
            return None
        import torch

        return torch.ops.profiler._record_function_enter_new(f"{RANGE}{place.index}", None)

    def end(self, place: OpProfile, begun: Any) -> None:
        """End the range of an op."""
        if begun is not None:
            import torch

            torch.ops.profiler._record_function_exit._RecordFunction(begun)

    def stop(self, places: Sequence[OpProfile]) -> None:
        """End a running profile, and add the kernels in the ranges of each op to the op."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if get_ident() != self._thread:
            self.obstacle = "the profile was asked for on another thread than it was begun on"
            return
        profiler.stop()
        for index, kernel, device, took in seen(profiler.events() or ()):
            if index < len(places):
                counted = places[index].kernels.setdefault((kernel, device), [0, 0])
                counted[0] += 1
                counted[1] += took

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
    """Yield kernels, and operators on a CPU: index of the innermost range around each, name, device, and
    nanoseconds without those of operators within.
    """
    for event in events:
        around = event.cpu_parent
        while around is not None and not around.name.startswith(RANGE):
            around = around.cpu_parent
        if around is None:
            continue
        index = int(around.name.removeprefix(RANGE))
        for kernel in event.kernels:
            yield index, kernel.name, f"cuda:{kernel.device}", round(1000 * kernel.duration)
        if event.name.startswith("aten::"):
            yield index, event.name, "cpu", round(1000 * event.self_cpu_time_total)


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

    def __init__(self, places: Sequence[OpProfile], obstacle: str = "") -> None:
        self.places = tuple(places)
        self._obstacle = obstacle

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each kernel of each op, those with most time first."""
        found: dict[tuple[str, ...], list[list[int]]] = {}
        for place in self.places:
            for kernel, counted in place.kernels.items():
                found.setdefault((*place.names.values(), *kernel), []).append(counted)
        sums = ((key, [sum(column) for column in zip(*each, strict=True)]) for key, each in found.items())
        rows = [(*key, calls, MS * took) for key, (calls, took) in sums]
        return sorted(rows, key=lambda row: -row[-1])

    def notes(self) -> Sequence[str]:
        """Return a sentence on the times, or on why there are none."""
        if self._obstacle:
            return [f"torch.profiler did not tell: {self._obstacle}."]
        if not any(place.kernels for place in self.places):
            return ["ProfileTool(kernels=True) lets torch.profiler run, which tells; here nothing was told."]
        return ["On a CPU operators of ATen, without those within them; on a GPU kernels."]

"""Recorder of the begin and end of executions."""

from __future__ import annotations

from _thread import get_ident
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import amanda
from amanda.errors import OptionError
from amanda.tools.profile._device import DeviceClock
from amanda.tools.profile._kernels import Kernels
from amanda.tools.profile._log import GRAPH, Log
from amanda.tools.profile._memory import Memory
from amanda.tools.profile._op import OpProfile

RECOMPUTED = -1
"""Stands for the id of a backward op in the key of a recomputation's profile."""
DEEPEST = 256
"""The most ops within ops, counting those that raised and did not end."""
Routines = tuple[Callable[..., None], Callable[..., None]]
"""The routine before an op, and the one after it."""


class Schedule(NamedTuple):
    """Cycles of steps: `wait` and `warmup` are not recorded, `active` are; 0 for all steps that follow.

    repeat: number of cycles, 0 for no end.
    """

    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 0

    def check(self) -> None:
        """Raise OptionError for cycles without end in which nothing is recorded apart."""
        if self.repeat and not self.active:
            raise OptionError(
                f"repeat={self.repeat} needs active, the number of steps to record in each cycle"
            )

    def records(self, step: int) -> bool:
        """Return True if a step, counted from 0, is recorded."""
        passed = self.wait + self.warmup
        if not self.active:
            return step >= passed
        cycle, place = divmod(step, passed + self.active)
        return place >= passed and (not self.repeat or cycle < self.repeat)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value) or "all"


Probe = DeviceClock | Kernels
"""Meter besides the program's clock, with `begin` and `end`; `end` is not called if the op raises."""


@dataclass(slots=True, eq=False)
class _Open:
    """An execution under way.

    inside: time of the ops within.  ours: time of the routines at those.  begun: by the probes.
    """

    place: OpProfile
    begin: int = 0
    inside: int = 0
    ours: int = 0
    begun: Sequence[Any] = ()


class Recorder:
    """Sums for each op and, up to `limit`, each execution.

    on_end: called when recording stops.
    places: profiles by the ids of the forward and the backward op.  clocks: of devices.
    memory: with the peaks of recorded steps.  log: for the timeline.
    recording: whether the present step is recorded.
    """

    def __init__(self, schedule: Schedule, limit: int, on_end: Callable[[], None] = lambda: None) -> None:
        self.schedule = schedule
        self.memory = Memory(limit)
        self.clocks: dict[str, DeviceClock] = {}
        self.places: dict[tuple[int, int | None], OpProfile] = {}
        self._on_end = on_end
        self._limit = limit
        self._step = self._first = 0
        self.recording = False
        self.clear()

    def clear(self) -> None:
        """Forget all executions; the present step is the first."""
        for place in self.places.values():
            place.clear()
        for clock in self.clocks.values():
            clock.clear()
        self.memory.clear()
        self.log = Log(self._limit)
        self._open: defaultdict[int, deque[_Open]] = defaultdict(partial(deque, maxlen=DEEPEST))
        self._first = self._step
        self._begin()

    def on_step(self, number: int) -> None:
        """Begin a step; a lower number than before says that earlier steps were not steps.

        Then the records so far count as one step, or are dropped if there is a schedule.
        """
        before, self._step = self._step, number
        if number < before:
            self._first = min(self._first, number)
            if self.schedule != Schedule():
                self.clear()
            else:
                self.log.join(number - self._first)
        self._begin()

    def _begin(self) -> None:
        present = self._step - self._first
        if self.log.number == present:
            return
        was, self.recording = self.recording, self.schedule.records(present)
        self.log.turn(present if self.recording else None)
        if was != self.recording:
            self._open.clear()
            if not self.recording:
                self._on_end()
            self.memory.record(self.recording)

    def recomputation(self, place: OpProfile) -> OpProfile:
        """Return the profile of an op's executions that run again in the backward pass."""
        if place.recomputation is None:
            place.recomputation = self.places[place.op_id, RECOMPUTED] = OpProfile(
                "recomputation", place.type, place.module, place.source, place.name, place.id, place.op_id,
                runs_others=place.runs_others, index=len(self.places),
            )  # fmt: skip
        return place.recomputation

    def in_sequence(self, place: OpProfile, probes: Sequence[Probe] = ()) -> Routines:
        """Return routines for an op that begins and ends on one thread, nested in other ops."""

        @amanda.innermost
        def begin(*, recomputed: bool = False) -> None:
            if not self.recording:
                return
            here = self.recomputation(place) if recomputed else place
            stack = self._open[get_ident()]
            entered = perf_counter_ns() if stack else 0
            one = _Open(here)
            if probes:
                one.begun = [probe.begin(here) for probe in probes]
            if stack:
                stack[-1].ours += perf_counter_ns() - entered
            stack.append(one)
            one.begin = perf_counter_ns()

        @amanda.innermost
        def end(*, recomputed: bool = False) -> None:
            now = perf_counter_ns()
            here = self.recomputation(place) if recomputed else place
            thread = get_ident()
            stack = self._open.get(thread)
            if not stack or (stack[-1].place is not here and all(one.place is not here for one in stack)):
                return
            one, inside, ours = stack.pop(), 0, 0
            while one.place is not here:  # the op raised, and its time belongs to the op around it
                inside, ours, one = inside + one.inside, ours + one.ours, stack.pop()
            ours += one.ours
            if probes:
                for probe, begun in zip(probes, one.begun, strict=True):
                    probe.end(here, begun)
            took = now - one.begin - ours
            here.add(took, one.inside + inside)
            self.log.keep(here, one.begin, now, thread)
            if stack:
                around = stack[-1]
                around.inside += took
                around.ours += ours + perf_counter_ns() - now

        return begin, end

    def in_parallel(self, place: OpProfile, is_fed: bool) -> Routines:
        """Return routines for an op of a graph, which begins and ends on any thread, within one run.

        Of several executions under way, in a loop, the one that began first is taken to end first.
        is_fed: whether the op has an input, at whose arrival it begins.
        """

        @amanda.innermost
        def begin(*_: Any, run: dict[Any, Any]) -> None:
            if self.recording:
                run.setdefault(place, deque()).append(perf_counter_ns())

        @amanda.innermost
        def end(*_: Any, run: dict[Any, Any]) -> None:
            now = perf_counter_ns()
            begun = run.get(place)
            if begun:
                start = begun.popleft()
                place.add(now - start, 0)
                self.log.keep(place, start, now, GRAPH)
            elif not is_fed and self.recording:
                place.calls += 1

        return begin, end


def floor(samples: int = 200) -> float:
    """Return the nanoseconds that the routines measure for an op that does nothing."""
    place = OpProfile("forward", "", "", "")
    recorder = Recorder(Schedule(), samples)
    begin, end = recorder.in_sequence(place)
    for _ in range(samples):
        begin()
        end()
    return float(median(event.took for event in recorder.log.events([place])))

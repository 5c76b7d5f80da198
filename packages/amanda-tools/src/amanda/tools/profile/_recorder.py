"""Begin and end of each execution, as the routines next to the op read them off the clock."""

from __future__ import annotations

from _thread import get_ident
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import amanda
from amanda.tools.profile._device import DeviceClock, DeviceTimes
from amanda.tools.profile._log import GRAPH, Log
from amanda.tools.profile._memory import Memory
from amanda.tools.profile._place import Place
from amanda.tools.profile._schedule import Schedule, Windows

DEEPEST = 256
"""Ops within ops; what an op that raised has left behind goes no deeper either."""
Routines = tuple[Callable[..., None], Callable[..., None]]
"""The routine before an op, and the one after it."""


class _Open:
    """An execution under way.

    inside: time of the ops within it.  ours: time of the routines at those.
    """

    __slots__ = ("begin", "inside", "mark", "ours", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.begin = self.inside = self.ours = 0
        self.mark: Any = None


class Recorder:
    """Keeps sums for each op and, up to `limit`, each execution.

    places: by the ids of the forward and the backward op.  memory: told which steps are recorded.
    on_end: called when steps are not recorded any more.
    recording: whether the present step is.  log: what a timeline shows.
    """

    def __init__(
        self,
        schedule: Schedule,
        limit: int,
        memory: Memory | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.schedule = schedule
        self.memory = memory
        self._on_end = on_end
        self.places: dict[tuple[int, int | None], Place] = {}
        self._limit = limit
        self._step = self._first = 0
        self.recording = False
        self.clear()

    def clear(self) -> None:
        """Forget all executions; the present step is the first."""
        for place in self.places.values():
            place.clear()
        self.windows = Windows(self._limit)
        self.log = Log(self._limit)
        self.device_times = DeviceTimes()
        self._open: defaultdict[int, deque[_Open]] = defaultdict(partial(deque, maxlen=DEEPEST))
        if self.memory is not None:
            self.memory.clear()
        self._first = self._step
        self._begin()

    def on_step(self, number: int) -> None:
        """Begin a step; its number is lower than before if earlier steps turned out to be none."""
        if number < self._step:
            self._recount(number)
        self._step = number
        self._begin()

    def _recount(self, number: int) -> None:
        """Count the records so far as one step, or drop them where a schedule records other steps."""
        self._step = number
        self._first = min(self._first, number)
        if self.schedule != Schedule():
            self.clear()
        else:
            self.windows.join(number - self._first)

    def _begin(self) -> None:
        present = self._step - self._first
        if self.windows.number == present:
            return
        self.windows.close()
        was, self.recording = self.recording, self.schedule.records(present)
        if self.recording:
            self.windows.open(present)
        if was != self.recording:
            self._open.clear()
            if not self.recording:
                self._on_end()
            if self.memory is not None:
                (self.memory.start if self.recording else self.memory.stop)()

    def in_sequence(self, place: Place) -> Routines:
        """Routines for an op that ends on the thread that it begins on, the last begun first."""

        @amanda.innermost
        def begin() -> None:
            if not self.recording:
                return
            stack = self._open[get_ident()]
            entered = perf_counter_ns() if stack else 0
            one = _Open(place)
            if stack:
                stack[-1].ours += perf_counter_ns() - entered
            stack.append(one)
            one.begin = perf_counter_ns()

        @amanda.innermost
        def end() -> None:
            now = perf_counter_ns()
            thread = get_ident()
            stack = self._open.get(thread)
            if stack:
                self._ended(place, now, thread, stack)

        return begin, end

    def on_device(self, place: Place, clock: DeviceClock) -> Routines:
        """Routines as `in_sequence`, which also mark the begin and end in the device's queue."""
        began, ended = self.in_sequence(place)

        @amanda.innermost
        def begin() -> None:
            began()
            stack = self._open.get(get_ident())
            if stack and stack[-1].place is place:
                stack[-1].mark = clock.mark()
                stack[-1].begin = perf_counter_ns()

        @amanda.innermost
        def end() -> None:
            stack = self._open.get(get_ident())
            mark = stack[-1].mark if stack and stack[-1].place is place else None
            ended()
            self.device_times.add(clock, place, mark, clock.mark() if mark is not None else None)

        return begin, end

    def _ended(self, place: Place, now: int, thread: int, stack: deque[_Open]) -> None:
        one = stack.pop()
        if one.place is not place:
            stack.append(one)
            if all(other.place is not place for other in stack):
                return
            one = self._unwound(place, stack)
        took = now - one.begin - one.ours
        place.add(took, one.inside)
        self.windows.note(one.begin, now)
        self.log.keep(place, one.begin, now - one.begin, thread)
        if stack:
            around = stack[-1]
            around.inside += took
            around.ours += one.ours + perf_counter_ns() - now

    @staticmethod
    def _unwound(place: Place, stack: deque[_Open]) -> _Open:
        """The execution that ends, without those within it that raised; their time was spent in it."""
        inside = ours = 0
        while stack[-1].place is not place:
            raised = stack.pop()
            inside += raised.inside
            ours += raised.ours
        one = stack.pop()
        one.inside += inside
        one.ours += ours
        return one

    def in_parallel(self, place: Place) -> Routines:
        """Routines for an op of a graph, which begins and ends on any thread, within one run of the graph.

        Where several executions of it are under way, in a loop, the first begun ends first.
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
                self.windows.note(start, now)
                self.log.keep(place, start, now - start, GRAPH)

        return begin, end

    def counting(self, place: Place) -> Callable[..., None]:
        """A routine for an op whose begin cannot be told."""

        @amanda.innermost
        def end(*_: Any) -> None:
            if self.recording:
                place.calls += 1

        return end


def floor(samples: int = 200) -> float:
    """Nanoseconds that the routines find between a begin and an end with nothing between them."""
    place = Place("forward", "", "", "")
    recorder = Recorder(Schedule(), samples)
    begin, end = recorder.in_sequence(place)
    for _ in range(samples):
        begin()
        end()
    return float(median(event.took for event in recorder.log.events([place])))

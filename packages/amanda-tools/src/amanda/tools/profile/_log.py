"""Log of executions and steps for a timeline, in little memory."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from amanda.tools.profile._op import OpProfile

GRAPH = 0
"""Thread number of the ops of a graph, which may begin and end on different threads."""


class Event(NamedTuple):
    """One execution; times in nanoseconds of `time.perf_counter_ns`.  thread: from `get_ident`."""

    place: OpProfile
    begin: int
    took: int
    thread: int


class Step(NamedTuple):
    """A recorded step, from the begin of its first op to the end of its last, in nanoseconds."""

    number: int
    begin: int
    end: int


class Thread(NamedTuple):
    """A thread of the operating system."""

    number: int
    name: str

    @classmethod
    def present(cls) -> Thread:
        """Return the present thread; `threading.current_thread` would register a foreign one in Python."""
        number = threading.get_native_id()
        named = (one.name for one in threading.enumerate() if one.native_id == number)
        comm = Path(f"/proc/self/task/{number}/comm")
        name = next(named, None) or (comm.read_text().strip() if comm.exists() else f"thread {number}")
        return cls(number, name)


@dataclass(frozen=True)
class Timeline:
    """Data of a trace: executions by their begin, threads, recorded steps, and bytes alive by device.

    dropped: number of executions that are not in the timeline.
    """

    events: Sequence[Event] = ()
    threads: Mapping[int, Thread] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    alive: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    dropped: int = 0


class Log:
    """A log of up to `limit` executions, in the order of their ends, and up to `limit` steps.

    number: of the step that is recorded now, or None.
    threads: by `get_ident`, read when the first op ended there.  dropped: number of executions not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._numbers = array("q")  # four for each: objects would be the garbage collector's work
        self._steps: list[Step] = []
        self._count = self._spent = 0
        self._begin: int | None = None
        self._end = 0
        self.number: int | None = None
        self.threads: dict[int, Thread] = {}
        self.dropped = 0

    def keep(self, place: OpProfile, begin: int, end: int, thread: int) -> None:
        """Add one execution to the step, and keep it if there is room."""
        if self._begin is None or begin < self._begin:
            self._begin = begin
        if end > self._end:
            self._end = end
        if not self._left:
            self.dropped += 1
            return
        self._left -= 1
        self._numbers.extend((place.index, begin, end - begin, thread))
        if thread not in self.threads:
            self.threads[thread] = Thread.present()

    def turn(self, number: int | None) -> None:
        """End the present step, unless no op ran in it, and begin the next; number: None to record none."""
        for step in self._present():
            self._count += 1
            self._spent += step.end - step.begin
            if self._count <= self._limit:
                self._steps.append(step)
        self.number, self._begin = number, None

    def join(self, number: int) -> None:
        """Merge all steps so far into the present one."""
        begins = [step.begin for step in (*self._steps, *self._present())]
        self._steps, self._count, self._spent = [], 0, 0
        self.number, self._begin = number, min(begins, default=None)

    def steps(self) -> tuple[list[Step], int, int]:
        """Return the kept steps, the number of all steps, and their nanoseconds, with the present step."""
        present = self._present()
        spent = self._spent + sum(step.end - step.begin for step in present)
        return [*self._steps, *present][: self._limit], self._count + len(present), spent

    def _present(self) -> list[Step]:
        if self.number is None or self._begin is None:
            return []
        return [Step(self.number, self._begin, self._end)]

    def events(self, places: Sequence[OpProfile]) -> list[Event]:
        """Return the executions sorted by begin, longer ones first; places: by index."""
        numbers = iter(self._numbers.tolist())
        events = [Event(places[index], *rest) for index, *rest in zip(*[numbers] * 4, strict=True)]
        return sorted(events, key=lambda event: (event.begin, -event.took))

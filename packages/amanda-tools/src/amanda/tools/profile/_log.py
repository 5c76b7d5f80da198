"""The executions that a timeline shows, in little memory."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from amanda.tools.profile._place import Place

GRAPH = 0
"""Thread of the ops of a graph, whose begin and end may be on two."""


class Event(NamedTuple):
    """One execution; in nanoseconds of `time.perf_counter_ns`.  thread: as `get_ident` tells it."""

    place: Place
    begin: int
    took: int
    thread: int


class Thread(NamedTuple):
    """A thread as the operating system knows it."""

    number: int
    name: str

    @classmethod
    def present(cls) -> Thread:
        """The one that this runs on; asking Python for it would make it one of Python's."""
        number = threading.get_native_id()
        named = (one.name for one in threading.enumerate() if one.native_id == number)
        comm = Path(f"/proc/self/task/{number}/comm")
        name = next(named, None) or (comm.read_text().strip() if comm.exists() else f"thread {number}")
        return cls(number, name)


class Log:
    """Keeps as many executions as its limit says, in the order of their ends.

    threads: by `get_ident`, as they were when the first op ended there.  dropped: executions not kept.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._numbers = array("q")  # four for each: objects would be the garbage collector's work
        self.threads: dict[int, Thread] = {}
        self.dropped = 0

    def keep(self, place: Place, begin: int, took: int, thread: int) -> None:
        """Keep one execution, if there is room."""
        if not self._left:
            self.dropped += 1
            return
        self._left -= 1
        self._numbers.extend((place.index, begin, took, thread))
        if thread not in self.threads:
            self.threads[thread] = Thread.present()

    def events(self, places: Sequence[Place]) -> list[Event]:
        """The executions; places by their index."""
        numbers = iter(self._numbers.tolist())
        return [Event(places[index], *rest) for index, *rest in zip(*[numbers] * 4, strict=True)]


def lanes(events: Sequence[Event]) -> list[int]:
    """For each event, in the order of their begins, the first lane that is free: none overlaps another."""
    free: list[int] = []
    chosen = []
    for event in events:
        lane = next((i for i, end in enumerate(free) if end <= event.begin), len(free))
        if lane == len(free):
            free.append(0)
        free[lane] = event.begin + event.took
        chosen.append(lane)
    return chosen

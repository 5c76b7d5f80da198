"""Records of a profile: sums of each op, bytes of live tensors by owner, and the log of a timeline."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from amanda import interceptor
from amanda.tools.kit import place_text
from amanda.tools.results import amount

KEYS = ("phase", "type", "module", "source")
_SUMMED_FIELDS = ("calls", "timed", "total", "own", "device", "allocated", "at_peak")
"""Fields that `summed` adds up, without None."""


@dataclass(eq=False)
class OpProfile:
    """One op, forward or backward, with the sums over its recorded executions; times in nanoseconds.

    name: the framework's own ("AddmmBackward0").
    id: of 64 bits; op_id: the id of the forward op, which is the same for a forward op.
    total: time between begin and end.  own: total without the ops within this op.
    calls: executions that ended; timed: those of them whose begin is known.
    device: time on the device, None without a device.
    allocated: bytes that the op allocated for tensors; None if memory was not recorded.
    at_peak: bytes of these that were alive at the peaks, in a result.
    index: among all ops.  kernels: by name and device, calls and nanoseconds.
    recomputation: profile of the executions that run again in the backward pass; None while there are none.
    runs_others: the op runs ops whose times cannot be subtracted from its own.
    """

    phase: str
    type: str
    module: str
    source: str
    name: str = ""
    id: int = 0
    op_id: int = 0
    calls: int = 0
    timed: int = 0
    total: int = 0
    own: int = 0
    least: int = 0
    most: int = 0
    device: int | None = None
    allocated: int | None = None
    at_peak: int = 0
    runs_others: bool = False
    index: int = 0
    kernels: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    recomputation: OpProfile | None = None

    def add(self, executions: int, total: int, inner: int, least: int, most: int) -> None:
        """Add executions.

        Args:
            executions: Number of executions.
            total: Nanoseconds of all executions.
            inner: Nanoseconds of the ops within them.
            least: Nanoseconds of the shortest one.
            most: Nanoseconds of the longest one.
        """
        # 0 stands for none so far: the first executions set the least.
        self.least = min(self.least, least) if self.timed else least
        self.most = max(self.most, most)
        self.calls += executions
        self.timed += executions
        self.total += total
        # Ops within ran on other threads, or in a graph, so that their time cannot be subtracted.
        if not self.runs_others:
            self.own += total - inner

    def clear(self) -> None:
        """Forget the executions."""
        self.calls = self.timed = self.total = self.own = self.least = self.most = 0
        self.device = self.allocated = None
        self.kernels = {}

    @property
    def names(self) -> dict[str, str]:
        """Return the keys of rows, with the op's values."""
        return {key: getattr(self, key) for key in KEYS}

    @property
    def about(self) -> dict[str, str]:
        """Return the keys, the name and the id in hexadecimal digits, for files."""
        return {**self.names, "name": self.name, "id": f"{self.id:016x}"}


def summed(profiles: Sequence[OpProfile]) -> OpProfile:
    """Return a new profile with the sums of profiles, of one a copy, and the names of the first."""
    total = replace(profiles[0], kernels={}, recomputation=None)
    for name in _SUMMED_FIELDS:
        numbers = [number for profile in profiles if (number := getattr(profile, name)) is not None]
        setattr(total, name, sum(numbers) if numbers else None)
    total.least = min((profile.least for profile in profiles if profile.timed), default=0)
    total.most = max(profile.most for profile in profiles)
    for profile in profiles:
        for kernel, (calls, nanoseconds) in profile.kernels.items():
            earlier_calls, earlier_nanoseconds = total.kernels.get(kernel, (0, 0))
            total.kernels[kernel] = [earlier_calls + calls, earlier_nanoseconds + nanoseconds]
    return total


OLDER = OpProfile("given", "parameters, inputs, older tensors", "", "")
"""Owner of the storages that no recorded op allocated: parameters, inputs."""


# A device's text is built anew at each call, which is slower than the rest of a routine.
name_of = cache(str)
"""Return the name of a device."""


@dataclass(frozen=True)
class Peak:
    """The most bytes alive on a device at once.  owners: ops that allocated them, most bytes first."""

    device: str
    size: int
    owners: Sequence[tuple[OpProfile, int]]

    def __str__(self) -> str:
        parts = [
            f"{amount(size, 'B')} {place_text(op.type, op.module, op.phase if op.phase != 'given' else '')}"
            for op, size in self.owners[:3]
        ]
        if other_bytes := sum(size for _, size in self.owners[3:]):
            parts.append(f"{amount(other_bytes, 'B')} other ops")
        return f"peak of {amount(self.size, 'B')} on {self.device}: {'; '.join(parts)}"


GRAPH = 0
"""Thread number of the ops of a graph, which may begin and end on different threads."""


class TimedExecution(NamedTuple):
    """One execution; times in nanoseconds of `time.perf_counter_ns`.  thread: from `get_ident`."""

    place: OpProfile
    begin: int
    took: int
    thread: int


class RecordedStep(NamedTuple):
    """A recorded step, from the begin of its first op to the end of its last, in nanoseconds."""

    number: int
    begin: int
    end: int


class OsThread(NamedTuple):
    """A thread of the operating system."""

    number: int
    name: str

    @classmethod
    def present(cls) -> OsThread:
        """Return the present thread."""
        # threading.current_thread would register a thread of C++ in Python, and keep it
        # there for good.
        number = threading.get_native_id()
        names = (thread.name for thread in threading.enumerate() if thread.native_id == number)
        comm = Path(f"/proc/self/task/{number}/comm")
        name = next(names, None) or (comm.read_text().strip() if comm.exists() else f"thread {number}")
        return cls(number, name)


@dataclass(frozen=True)
class Timeline:
    """Data of a trace: executions by their begin, threads, recorded steps, and bytes alive by device.

    dropped: number of executions that are not in the timeline.
    """

    events: Sequence[TimedExecution] = ()
    threads: Mapping[int, OsThread] = field(default_factory=dict)
    steps: Sequence[RecordedStep] = ()
    alive: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    dropped: int = 0


class ExecutionLog:
    """A log of up to `limit` executions, in the order of their ends, and up to `limit` steps.

    clock: which logs the executions.  number: of the step that is recorded now, or None.
    threads: by `get_ident`, read when the first op ended there.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Native code keeps the numbers of executions: the garbage collector would walk objects.
        self.clock = interceptor.Clock(limit, self._add_thread)
        self.clear()

    def clear(self) -> None:
        """Forget all executions and steps."""
        self.clock.clear()
        self._steps: list[RecordedStep] = []
        self._step_count = self._steps_duration = 0  # of all steps that have ended, also beyond the limit
        self.number: int | None = None
        self.threads: dict[int, OsThread] = {}

    @property
    def dropped(self) -> int:
        """Return the number of executions that are not kept."""
        return self.clock.dropped

    def _add_thread(self, thread: int) -> None:
        self.threads[thread] = OsThread.present()

    def start_step(self, number: int | None) -> None:
        """End the present step, unless it has no ops, and begin the next.  number: None not to record it."""
        for step in self._steps_under_way():
            self._step_count += 1
            self._steps_duration += step.end - step.begin
            if self._step_count <= self._limit:
                self._steps.append(step)
        self.number, self.clock.step_begin = number, -1

    def merge_steps(self, number: int) -> None:
        """Merge all steps so far into the present one."""
        begins = [step.begin for step in (*self._steps, *self._steps_under_way())]
        self._steps, self._step_count, self._steps_duration = [], 0, 0
        self.number, self.clock.step_begin = number, min(begins, default=-1)

    def steps(self) -> tuple[list[RecordedStep], int, int]:
        """Return the logged steps, the number of all steps and their nanoseconds, with the present step."""
        under_way = self._steps_under_way()
        duration = self._steps_duration + sum(step.end - step.begin for step in under_way)
        return [*self._steps, *under_way][: self._limit], self._step_count + len(under_way), duration

    def _steps_under_way(self) -> list[RecordedStep]:
        """Return the present step in a list; an empty list if it has no ops or is not recorded."""
        if self.number is None or self.clock.step_begin < 0:
            return []
        return [RecordedStep(self.number, self.clock.step_begin, self.clock.step_end)]

    def numbers(self) -> array[int]:
        """Return four numbers of each execution: index of the profile, begin, duration, and thread."""
        return array("q", self.clock.log())


def events_of(numbers: Iterable[int], profiles: Sequence[OpProfile]) -> list[TimedExecution]:
    """Return the executions of a log sorted by begin, longer ones first.  profiles: of all ops, by index."""
    number = iter(numbers)
    rows = zip(number, number, number, number, strict=True)
    events = [TimedExecution(profiles[index], *times) for index, *times in rows]
    return sorted(events, key=lambda event: (event.begin, -event.took))

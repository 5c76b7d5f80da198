"""Records of a profile: sums of each op, bytes of live tensors by owner, and the log of a timeline."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

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


@dataclass(eq=False, slots=True)
class DeviceMemory:
    """Live bytes of one device, by the ops that allocated them, and their peak in recorded steps.

    recording: whether steps are recorded.  limit: number of changes kept for the timeline.
    peak: the most bytes alive in recorded steps, None before any.  alive: bytes now.
    older_bytes: bytes that no recorded op allocated, which `older_tensors` owns.  bytes_by_owner: live ones.
    changes_since_peak: bytes added to `bytes_by_owner` since the peak, which gives the owners at the peak.
    history: nanoseconds, and live bytes without the older bytes until then, after each change.
    """

    name: str
    limit: int
    recording: bool
    peak: int | None
    older_tensors: OpProfile = field(
        default_factory=partial(OpProfile, "given", "parameters, inputs, older tensors", "", "")
    )
    alive: int = 0
    older_bytes: int = 0
    bytes_by_owner: defaultdict[OpProfile, int] = field(default_factory=lambda: defaultdict(int))
    changes_since_peak: defaultdict[OpProfile, int] = field(default_factory=lambda: defaultdict(int))
    history: list[tuple[int, int]] = field(default_factory=list)

    def change_bytes(self, owner: OpProfile, size: int, when: int | None = None) -> None:
        """Add to the live bytes of an op; size: negative for freed bytes.  when: in ns; None for now."""
        self.bytes_by_owner[owner] += size
        self.changes_since_peak[owner] += size
        self.alive += size
        if self.recording:
            # Only an allocation can raise the peak.
            if size > 0:
                self.note_peak()
            if len(self.history) < self.limit:
                self.history.append((when or perf_counter_ns(), self.alive - self.older_bytes))

    def add_older_bytes(self, size: int) -> None:
        """Add bytes that were alive before the scope, and so at the peak, but are first read now."""
        self.bytes_by_owner[self.older_tensors] += size
        self.alive += size
        self.older_bytes += size
        if self.peak is not None:
            self.peak += size

    def note_peak(self) -> None:
        """Set the peak to the present bytes if these are more."""
        # Also an equal peak: the latest of equal ones has the fewest changes since.
        if self.peak is None or self.alive >= self.peak:
            self.peak = self.alive
            self.changes_since_peak.clear()

    def find_peak(self) -> Peak:
        """Return the peak, with the bytes of each owner at that time."""
        sizes = [
            (owner, size - self.changes_since_peak.get(owner, 0))
            for owner, size in self.bytes_by_owner.items()
        ]
        owners = sorted(((owner, size) for owner, size in sizes if size), key=lambda item: -item[1])
        return Peak(self.name, self.peak or 0, owners)


class _LiveStorage(NamedTuple):
    reference: weakref.ref[Any]
    size: int
    owner: OpProfile
    device: DeviceMemory


class StorageTracker:
    """Live storages of PyTorch, with the op that allocated each; weak references report their end.

    Storages that an op reads and no recorded op allocated belong to `older_tensors`: parameters, inputs.
    limit: number of changes kept for the timeline.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live_storage_by_id: dict[int, _LiveStorage] = {}
        self._deaths: deque[tuple[int, int]] = deque()  # (id, nanoseconds), not processed yet
        self.known_storages = interceptor.KnownStorages()  # of which `record_storages` need hear nothing
        self._recording = False
        self.devices: dict[str, DeviceMemory] = {}

    def set_recording(self, recording: bool) -> None:
        """Begin or stop to update the peaks of all devices."""
        self.process_deaths()
        self._recording = recording
        for device in self.devices.values():
            device.recording = recording
            if recording:
                device.note_peak()

    def clear(self) -> None:
        """Forget the peaks, but not the live storages."""
        self.process_deaths()
        for device in self.devices.values():
            device.peak = None
            device.history.clear()
        self.set_recording(self._recording)

    def record_storages(self, storages: Iterable[Any], maker: OpProfile | None) -> None:
        """Record storages that an op allocated or, for maker None, reads; a known one keeps its owner."""
        if self._deaths:
            self.process_deaths()
        live_storage_by_id = self._live_storage_by_id
        for storage in storages:
            # PyTorch has one Python object for a storage as long as that lives, so its id is a key.
            key, size = id(storage), storage.nbytes()
            live = live_storage_by_id.get(key)
            self.known_storages.add(storage._cdata)
            # An id is used again once its storage is gone, maybe before the death was processed.
            if live is not None and live.reference() is storage:
                if live.size != size:  # resized in place
                    live.device.change_bytes(live.owner, size - live.size)
                    live_storage_by_id[key] = live._replace(size=size)
                continue
            name = name_of(storage.device)
            device = self.devices.get(name)
            if device is None:
                peak = 0 if self._recording else None
                device = self.devices[name] = DeviceMemory(name, self._limit, self._recording, peak)
            # The callback holds the queue, not the tracker, which may be dropped before.
            on_death = partial(_note_death, self._deaths, key, self.known_storages, storage._cdata)
            reference = weakref.ref(storage, on_death)
            live_storage_by_id[key] = _LiveStorage(reference, size, maker or device.older_tensors, device)
            if maker is None:
                device.add_older_bytes(size)
                continue
            if self._recording:
                maker.allocated = (maker.allocated or 0) + size
            device.change_bytes(maker, size)

    def process_deaths(self) -> None:
        """Subtract the bytes of storages that have died, at the times of their deaths."""
        while self._deaths:
            key, when = self._deaths.popleft()
            live = self._live_storage_by_id.get(key)
            # Else the id belongs to a new storage already.
            if live is not None and live.reference() is None:
                del self._live_storage_by_id[key]
                live.device.change_bytes(live.owner, -live.size, when)


def _note_death(dead: deque[tuple[int, int]], key: int, known: Any, address: int, _: Any) -> None:
    # Runs at any time, on any thread, also within this module: no more than this.
    known.discard(address)
    dead.append((key, perf_counter_ns()))


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

    def events(self, profiles: Sequence[OpProfile]) -> list[TimedExecution]:
        """Return the executions sorted by begin, longer ones first.  profiles: of all ops, by index."""
        numbers = iter(array("q", self.clock.log()))
        rows = zip(numbers, numbers, numbers, numbers, strict=True)
        events = [TimedExecution(profiles[index], *times) for index, *times in rows]
        return sorted(events, key=lambda event: (event.begin, -event.took))

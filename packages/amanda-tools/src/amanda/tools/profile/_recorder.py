"""Recorder of the begin and end of executions, with clocks of devices and torch.profiler."""

from __future__ import annotations

from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import amanda
from amanda import interceptor
from amanda.action import ClockObserver
from amanda.tools.profile._records import GRAPH, ExecutionLog, OpProfile, events_of, name_of


class _TimedOp(NamedTuple):
    """An execution between two events in the queue of a device."""

    profile: OpProfile
    begin_event: Any
    end_event: Any


class DeviceClock:
    """Clock of a device: the time of an op lies between two events in the queue of the device.

    record_event: records an event, for None a new one; returns the event, or None if that is not possible
    now.  An event has the methods of torch.cuda.Event.
    """

    PENDING_LIMIT = 4096

    def __init__(self, record_event: Callable[[Any], Any]) -> None:
        self._record_event = record_event
        # Events are used again: to create one takes microseconds of the driver.
        self._free_events: list[Any] = []
        self._pending: deque[_TimedOp] = deque()  # ops whose events the device may not have passed yet

    def begin(self, profile: OpProfile) -> Any:
        """Return the event at which an op begins; None if the device cannot record one now."""
        return self._record_event(self._free_events.pop() if self._free_events else None)

    def end(self, profile: OpProfile, begin_event: Any) -> None:
        """Record the event at which an op ends; above PENDING_LIMIT ops, add the times of the oldest ones."""
        end_event = None if begin_event is None else self.begin(profile)
        if end_event is not None:
            self._pending.append(_TimedOp(profile, begin_event, end_event))
        # Without a wait: only events that the device has passed already are read.
        while len(self._pending) > self.PENDING_LIMIT and self._pending[0].end_event.query():
            self._read_oldest()

    def wait(self) -> None:
        """Wait for all events and read them."""
        while self._pending:
            self._pending[0].end_event.synchronize()
            self._read_oldest()

    def clear(self) -> None:
        self._pending.clear()

    def _read_oldest(self) -> None:
        """Add the time between the two events of the oldest op to its profile."""
        profile, begin_event, end_event = self._pending.popleft()
        # Milliseconds of an event become nanoseconds.
        profile.device = (profile.device or 0) + round(1e6 * begin_event.elapsed_time(end_event))
        self._free_events += (begin_event, end_event)


RANGE = "amanda: "


class KernelProfiler:
    """Run torch.profiler in recorded steps, with a range around each op and no synchronisation.

    obstacle: why torch.profiler does not run; "" if it does.
    """

    def __init__(self) -> None:
        self.obstacle = ""
        self._profiler: Any = None
        self._profiler_thread = 0

    def begin(self, profile: OpProfile) -> Any:
        """Return the range of an op, which ends when dropped; None if torch.profiler cannot run."""
        if self._profiler is None and not self._start_profiler():
            return None
        import torch

        # The range is an object that ends with its last reference, also if the op raises.
        return torch.ops.profiler._record_function_enter_new(f"{RANGE}{profile.index}", None)

    def end(self, profile: OpProfile, profiler_range: Any) -> None:
        """End the range of an op."""
        if profiler_range is not None:
            import torch

            torch.ops.profiler._record_function_exit._RecordFunction(profiler_range)

    def stop(self, profiles: Sequence[OpProfile]) -> None:
        """Stop torch.profiler if it runs, and add kernels to the ops in whose ranges they are."""
        if self._profiler is None:
            return
        # torch.profiler's state is one of the thread that started it, which may stop it later.
        if get_ident() != self._profiler_thread:
            self.obstacle = "the result was read on another thread than torch.profiler began on"
            return
        # Set to None first, so that an exception below does not stop it twice.
        profiler, self._profiler, self.obstacle = self._profiler, None, ""
        profiler.stop()
        for index, kernel, device, nanoseconds in kernels_in_ranges(profiler.events() or ()):
            if index < len(profiles):
                calls_and_time = profiles[index].kernels.setdefault((kernel, device), [0, 0])
                calls_and_time[0] += 1
                calls_and_time[1] += nanoseconds

    def _start_profiler(self) -> bool:
        """Start torch.profiler on this thread; return False, with the obstacle noted, if that fails."""
        import torch

        enabled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        # A second profile would end the program's own.
        if enabled and not self.obstacle:
            self.obstacle = "another profile was running already"
        if self.obstacle:
            return False
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._profiler_thread = get_ident()
        return True


def kernels_in_ranges(events: Iterable[Any]) -> Iterator[tuple[int, str, str, int]]:
    """Yield each kernel on a GPU, and each operator of ATen on a CPU.

    A kernel is the index of the innermost range around it, its name, device, and nanoseconds without those of
    operators within.
    """
    # Time of a kernel on a GPU is the kernel's; on a CPU an operator's time without the operators within.
    for event in events:
        # An operator of ATen calls others: the innermost range of an op owns the kernels of all of them.
        enclosing_range = event.cpu_parent
        while enclosing_range is not None and not enclosing_range.name.startswith(RANGE):
            enclosing_range = enclosing_range.cpu_parent
        if enclosing_range is None:
            continue
        index = int(enclosing_range.name.removeprefix(RANGE))
        for kernel in event.kernels:
            yield index, kernel.name, f"cuda:{kernel.device}", round(1000 * kernel.duration)
        if event.name.startswith("aten::"):
            yield index, event.name, "cpu", round(1000 * event.self_cpu_time_total)


RECOMPUTED = -1
"""Id of the backward op in the key of a recomputation's profile."""
Routines = tuple[Callable[..., None], Callable[..., None]]
"""The routine before an op, and the routine after it."""


class Schedule(NamedTuple):
    """Cycles of steps: `wait` and `warmup` are not recorded, `active` are; 0 for all steps that follow.

    repeat: number of cycles, 0 for no end.
    """

    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 0

    def records(self, step: int) -> bool:
        """Return True if a step, counted from 0, is recorded."""
        skipped_count = self.wait + self.warmup
        if not self.active:
            return step >= skipped_count
        cycle, step_in_cycle = divmod(step, skipped_count + self.active)
        return step_in_cycle >= skipped_count and (not self.repeat or cycle < self.repeat)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value) or "all"


Probe = DeviceClock | KernelProfiler
"""Meter besides the program's clock, with `begin` and `end`; `end` is not called if the op raises."""


class Recorder:
    """Sums for each op and, up to `limit`, each execution, in the steps that a schedule records.

    on_end: called when recording stops.
    profiles: by the ids of the forward and the backward op.  clocks: by name of the device.
    storages: with the peaks of recorded steps.  log: for the timeline.
    clock: for the ops of `nested_routines`; its numbers are the indices of profiles.
    """

    def __init__(self, schedule: Schedule, limit: int, on_end: Callable[[], None] = lambda: None) -> None:
        self.schedule = schedule
        self.storages = interceptor.StorageTracker(limit)
        self.clocks: dict[str, DeviceClock] = {}
        self.profiles: dict[tuple[int, int | None], OpProfile] = {}
        self._on_end = on_end
        self._step = self._first_step = 0
        self.log = ExecutionLog(limit)
        self.clock = self.log.clock
        self.clear()

    def clear(self) -> None:
        """Forget all executions; the present step is the first."""
        for op_profile in list(self.profiles.values()):
            op_profile.clear()
        for clock in self.clocks.values():
            clock.clear()
        self.storages.clear()
        self.log.clear()
        self._first_step = self._step
        self._begin_step()

    def on_step(self, number: int) -> None:
        """Begin a step.

        A lower number than before means that `Steps` took parts of one step for steps.  Then the records so
        far count as one step, or are dropped if there is a schedule.
        """
        previous_step, self._step = self._step, number
        if number < previous_step:
            self._first_step = min(self._first_step, number)
            if self.schedule != Schedule():
                self.clear()
            else:
                # The log, like the schedule, numbers steps from the first.
                self.log.merge_steps(number - self._first_step)
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin the step of the schedule, and start or stop recording with it; nothing in a logged step."""
        current_step = self._step - self._first_step
        # Nothing changes: this runs ahead of each op that may begin a step.
        if self.log.number == current_step:
            return
        was_recording, recording = self.recording, self.schedule.records(current_step)
        self.clock.recording = recording
        self.log.start_step(current_step if recording else None)
        if was_recording != recording:
            self.clock.abandon()  # an execution that is partly recorded has no time
            if not recording:
                self._on_end()
            self.storages.record(recording)

    @property
    def recording(self) -> bool:
        """Return True if the present step is recorded."""
        return self.clock.recording

    def collect(self) -> None:
        """Add the times that the clock has measured, and the bytes of new storages, to the profiles."""
        for op_profile in list(self.profiles.values()):  # other threads may add some
            if sums := self.clock.take(op_profile.index):
                op_profile.add(*sums)
            allocated = self.storages.take_allocated(op_profile.index)
            if allocated is not None:
                op_profile.allocated = (op_profile.allocated or 0) + allocated

    def recomputation(self, op_profile: OpProfile) -> OpProfile:
        """Return the profile of an op's executions that run again in the backward pass, new at first."""
        if op_profile.recomputation is None:
            op_profile.recomputation = self.profiles[op_profile.op_id, RECOMPUTED] = OpProfile(
                "recomputation", op_profile.type, op_profile.module, op_profile.source, op_profile.name,
                op_profile.id, op_profile.op_id, runs_others=op_profile.runs_others, index=len(self.profiles),
            )  # fmt: skip
        return op_profile.recomputation

    def follow(self, storages: Iterable[Any], owner: OpProfile | None) -> None:
        """Follow storages that an op allocated or, for owner None, reads; a known one keeps its owner."""
        number = -1 if owner is None else owner.index
        for storage in storages:
            device = name_of(storage.device)
            self.storages.follow(storage, storage._cdata, storage.nbytes(), device, number)

    def nested_routines(self, op_profile: OpProfile, probes: Sequence[Probe] = ()) -> Routines:
        """Return routines for an op that begins and ends on one thread, nested in other ops."""
        if not probes:
            return self._clock_observer(op_profile), self._clock_observer(op_profile, stops=True)

        # Next to the op, inside of the routines of all tools, whose time is not the op's.
        @amanda.innermost
        def begin(*, recomputed: bool = False) -> None:
            """Begin the probes, whose time is not the op's, and start the clock last."""
            if not self.recording:
                return
            now = perf_counter_ns()
            profile = self.recomputation(op_profile) if recomputed else op_profile
            probe_begins = [probe.begin(profile) for probe in probes]
            self.clock.exclude(perf_counter_ns() - now)
            self.clock.start(profile.index, probe_begins)

        @amanda.innermost
        def end(*, recomputed: bool = False) -> None:
            """Stop the clock first, then end the probes."""
            profile = self.recomputation(op_profile) if recomputed else op_profile
            probe_begins = self.clock.stop(profile.index)
            now = perf_counter_ns()
            for probe, probe_begin in zip(probes, probe_begins or (), strict=False):
                probe.end(profile, probe_begin)
            self.clock.exclude(perf_counter_ns() - now)

        return begin, end

    def _clock_observer(self, op_profile: OpProfile, stops: bool = False) -> ClockObserver:
        """Return an observer that starts or stops the clock at an op, and at its recomputations."""

        def find_recomputed() -> ClockObserver:
            return self._clock_observer(self.recomputation(op_profile), stops)

        return ClockObserver(self.clock, op_profile.index, stops, find_recomputed)

    def parallel_routines(self, op_profile: OpProfile, has_tensor_input: bool) -> Routines:
        """Return routines for an op of a graph, which begins and ends on any thread, within one run.

        Executions of an op that overlap, in a loop, are taken to end in the order of their begin.
        has_tensor_input: True if the op reads a tensor, at whose arrival it begins.
        """

        @amanda.innermost
        def begin(*_: Any, run: dict[Any, Any]) -> None:
            """Note the time at which an execution of this run begins."""
            if self.recording:
                # By run: several sessions may run a graph at once, and each has its own queue of begins.
                run.setdefault(op_profile, deque()).append(perf_counter_ns())

        @amanda.innermost
        def end(*_: Any, run: dict[Any, Any]) -> None:
            """Add the time since the earliest begin that has no end."""
            now = perf_counter_ns()
            begin_times = run.get(op_profile)
            if begin_times:
                start = begin_times.popleft()
                op_profile.add(1, now - start, 0, now - start, now - start)
                self.clock.add(op_profile.index, start, now, GRAPH)
            # An op without inputs has no begin: it is counted without time.
            elif not has_tensor_input and self.recording:
                op_profile.calls += 1

        return begin, end


def floor(samples: int = 200) -> float:
    """Return the median of the nanoseconds that the clock measures for an op that does nothing."""
    # A log of its own: the measurement must not appear in a profile.
    log = ExecutionLog(samples)
    log.clock.recording = True
    begin, end = interceptor.ClockObserver(log.clock, 0), interceptor.ClockObserver(log.clock, 0, True)
    for _ in range(samples):
        begin()
        end()
    op_profile = OpProfile(phase="forward", type="", module="", source="")
    return float(median(event.took for event in events_of(log.numbers(), [op_profile])))

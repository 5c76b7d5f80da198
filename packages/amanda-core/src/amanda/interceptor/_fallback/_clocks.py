"""The clock of executions in pure Python, and the routines that start and stop executions."""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any

_DEEPEST = 256
"""Most executions under way on a thread, with those that raised and never stop."""
NUMBER_LIMIT = 1 << 24
"""Number of ops on a clock or a tracker; in native code their tables have a row for each."""


@dataclass
class _Started:
    """An execution under way; times in nanoseconds."""

    number: int
    tag: Any
    begin: int = 0
    inner: int = 0
    excluded: int = 0


class Clock:
    """Times of executions, which nest on each thread, by the number of their op; in nanoseconds.

    The time of an execution is from its start to its stop, without what was excluded; `inner` is the time of
    the executions within it.  An execution that raised never stops: its time is that of the one around it.

    recording: whether executions are started; False at first.
    dropped: number of executions for which the log had no room.
    step_begin: the earliest begin of the executions since it was set to -1; -1 if there were none.
    step_end: the latest end of all executions.

    Args:
        limit: Number of executions in the log; further ones are in the sums alone.
        on_thread: Called with the number of a thread, of `threading.get_ident`, at its first logged
            execution; None to call nothing.
    """

    def __init__(self, limit: int, on_thread: Callable[[int], None] | None = None) -> None:
        self._limit = limit
        self._on_thread = on_thread
        self.recording = False
        self.clear()

    def clear(self) -> None:
        """Forget all executions."""
        self._started_by_thread: dict[int, deque[_Started]] = {}
        self._sums: dict[int, tuple[int, int, int, int, int]] = {}
        self._log = array("q")
        self._logged_threads: set[int] = set()
        self.dropped = self.step_end = 0
        self.step_begin = -1

    def abandon(self) -> None:
        """Forget the executions under way."""
        self._started_by_thread.clear()

    def start(self, number: int, tag: Any = None) -> None:
        """Start an execution of an op on this thread, while recording.

        Args:
            number: Of the op.
            tag: Object that `stop` returns.
        """
        _check_number(number)
        if self.recording:
            started = self._started_by_thread.setdefault(get_ident(), deque(maxlen=_DEEPEST))
            execution = _Started(number, tag)
            started.append(execution)
            execution.begin = perf_counter_ns()

    def stop(self, number: int) -> Any:
        """Stop the innermost execution of an op on this thread, and return its tag; do nothing without one.

        Args:
            number: Of the op.
        """
        now, thread = perf_counter_ns(), get_ident()
        started = self._started_by_thread.get(thread, deque())
        if all(execution.number != number for execution in started):
            return None
        execution = started.pop()
        inner, excluded = execution.inner, execution.excluded
        while execution.number != number:
            execution = started.pop()
            inner, excluded = inner + execution.inner, excluded + execution.excluded
        duration = now - execution.begin - excluded
        executions, total, all_inner, least, most = self._sums.get(number, (0, 0, 0, duration, duration))
        self._sums[number] = (
            executions + 1, total + duration, all_inner + inner, min(least, duration), max(most, duration)
        )  # fmt: skip
        self.add(number, execution.begin, now, thread)
        if started:
            started[-1].inner += duration
            started[-1].excluded += excluded + perf_counter_ns() - now
        return execution.tag

    def exclude(self, nanoseconds: int) -> None:
        """Leave time out of the executions under way on this thread.

        Args:
            nanoseconds: Time that does not count.
        """
        for execution in list(self._started_by_thread.get(get_ident(), ()))[-1:]:
            execution.excluded += nanoseconds

    def add(self, number: int, begin: int, end: int, thread: int) -> None:
        """Log an execution that was measured otherwise.

        Args:
            number: Of the op.
            begin: Nanoseconds of `time.perf_counter_ns`.
            end: Nanoseconds of the same clock.
            thread: Number of `threading.get_ident`, or any other.
        """
        self.step_begin = begin if self.step_begin < 0 else min(self.step_begin, begin)
        self.step_end = max(self.step_end, end)
        if len(self._log) >= 4 * self._limit:
            self.dropped += 1
            return
        self._log.extend((number, begin, end - begin, thread))
        if thread not in self._logged_threads:
            self._logged_threads.add(thread)
            if self._on_thread is not None:
                self._on_thread(thread)

    def take(self, number: int) -> tuple[int, int, int, int, int] | None:
        """Return and forget an op's executions, with their total, inner, least and most nanoseconds.

        Args:
            number: Of the op; without executions the result is None.
        """
        return self._sums.pop(number, None)

    def log(self) -> bytes:
        """Return the executions by their ends, four int64 each: number, begin, duration, thread."""
        return self._log.tobytes()


def _check_number(number: int) -> None:
    """Raise ValueError for a number that no op has."""
    if not 0 <= number < NUMBER_LIMIT:
        raise ValueError(f"the number of an op is from 0 to {NUMBER_LIMIT - 1}, not {number}")


class ClockObserver:
    """Routine that starts an execution before an op, or stops it after the op.

    Args:
        clock: The clock, which others share.
        number: Of the op.
        stops: Whether the routine is the one after the op.
    """

    def __init__(self, clock: Clock, number: int, stops: bool = False) -> None:
        _check_number(number)
        self._clock, self._number, self._stops = clock, number, stops

    def __call__(self, *values: Any, **options: Any) -> None:
        """Start or stop an execution, as native code does without this call."""
        if self._stops:
            self._clock.stop(self._number)
        else:
            self._clock.start(self._number)

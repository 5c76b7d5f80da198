"""The schedule of steps that are recorded."""

from __future__ import annotations

from typing import NamedTuple

from amanda.errors import ToolError


class Schedule(NamedTuple):
    """Cycles of steps: `wait` and `warmup` pass by, `active` are recorded; `repeat` cycles, 0 for no end.

    active: 0 for all that follow.
    """

    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 0

    def check(self) -> None:
        """Raise ToolError for numbers of steps that are none."""
        for name, value in self._asdict().items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ToolError(f"{name} is a number of steps, 0 or more, not {value!r}")
        if self.repeat and not self.active:
            raise ToolError(f"repeat={self.repeat} needs active, the number of steps to record in each cycle")

    def records(self, step: int) -> bool:
        """Return True if a step, counted from 0, is recorded."""
        passed = self.wait + self.warmup
        if not self.active:
            return step >= passed
        cycle, place = divmod(step, passed + self.active)
        return place >= passed and (not self.repeat or cycle < self.repeat)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value) or "all"


class Step(NamedTuple):
    """A recorded step, from the begin of its first op to the end of its last; in nanoseconds."""

    number: int
    begin: int
    end: int


class Windows:
    """The steps that were recorded; `limit` of them are kept, the sums go on.

    number: of the step that is being recorded, None where none is.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Step] = []
        self._count = self._spent = 0
        self.number: int | None = None
        self._begin: int | None = None
        self._end = 0

    def open(self, number: int) -> None:
        """Begin a step."""
        self.number = number

    def note(self, begin: int, end: int) -> None:
        """Add an execution to the step."""
        if self._begin is None or begin < self._begin:
            self._begin = begin
        if end > self._end:
            self._end = end

    def close(self) -> None:
        """End the step, if there is one in which anything was executed."""
        step, self.number, self._begin = self._present(), None, None
        if step is not None:
            self._count += 1
            self._spent += step.end - step.begin
            if len(self._kept) < self._limit:
                self._kept.append(step)

    def join(self, number: int) -> None:
        """Make one of all steps so far, and go on with it."""
        present = self._present()
        begins = [step.begin for step in (*self._kept, present) if step is not None]
        self._kept, self._count, self._spent = [], 0, 0
        self.number, self._begin = number, min(begins, default=None)

    def _present(self) -> Step | None:
        if self.number is None or self._begin is None:
            return None
        return Step(self.number, self._begin, self._end)

    @property
    def steps(self) -> list[Step]:
        """Those that are kept, and the present one."""
        present = self._present()
        return [*self._kept, *([] if present is None else [present])][: self._limit]

    @property
    def count(self) -> int:
        """Number of steps."""
        return self._count + (self._present() is not None)

    @property
    def spent(self) -> int:
        """Nanoseconds of all of them."""
        present = self._present()
        return self._spent + (0 if present is None else present.end - present.begin)

"""Which steps are recorded."""

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
        """Whether a step, counted from 0, is recorded."""
        passed = self.wait + self.warmup
        if not self.active:
            return step >= passed
        cycle, place = divmod(step, passed + self.active)
        return place >= passed and (not self.repeat or cycle < self.repeat)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value) or "all"

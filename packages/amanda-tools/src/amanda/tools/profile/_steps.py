"""Which executions are recorded: steps of the program, and a schedule of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from amanda.errors import ToolError

if TYPE_CHECKING:
    from amanda.tools.profile._place import Place


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


NEVER, ANY = -1, sys.maxsize


class Steps:
    """The step that the program is in.

    A step begins when the op that came first executes again.  Where ops ran once ahead of the loop, it is
    the earliest op that does so.

    present: number of the step.  watched: forward ops up to this order may begin one.
    """

    def __init__(self) -> None:
        self.present = 0
        self.watched = ANY

    def begins_with(self, place: Place, in_sequence: bool) -> bool:
        """Whether a step begins with this execution of an op whose order is watched.

        in_sequence: False where ops run side by side, so that a step may begin with a later op than the last
        one did: the first op to come again stands for all until the step ends.
        """
        last, place.step = place.step, self.present
        if last is None:
            return False
        self.watched = place.order
        if in_sequence or last == self.present:
            place.step = self.present = self.present + 1
            return True
        return False

    def told(self) -> None:
        """Hear that a step ends, from someone who knows: nothing else begins one from now on."""
        self.watched = NEVER
        self.present += 1

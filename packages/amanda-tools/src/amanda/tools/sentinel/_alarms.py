"""Alarms, and the spikes that give some."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

from amanda.errors import AmandaError

Kind = Literal["corruption", "nan", "spike", "ranks"]


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong in one step, and the op at which it began there.

    kind: "corruption": an op, run again on the same inputs, gave other bits; "nan"; "spike": a norm far above
    those of earlier steps; "ranks": data-parallel ranks hold different gradients or parameters.
    module: for "ranks", the path of the parameter.
    """

    kind: Kind
    step: int
    phase: str
    type: str
    module: str
    source: str
    detail: str

    def __str__(self) -> str:
        module = f" of {self.module}" if self.module else ""
        source = f", {self.source}" if self.source else ""
        where = f"{self.type} ({self.phase}){module}{source}: " if self.type else ""
        return f"{self.kind} in step {self.step}: {where}{self.detail}"


class SentinelError(AmandaError, RuntimeError):
    """An alarm, where the tool has to stop the program; `alarm` has its parts."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


class Spikes:
    """The norms of one tensor in a window of executions, and how far a new norm is above them.

    The distance is that of logarithms, in robust standard deviations: 1.4826 times the median absolute
    deviation (Rousseeuw & Croux 1993), and at least `LEAST`.  Zeros are left out.
    """

    LEAST, ENOUGH = 0.1, 8

    def __init__(self, window: int) -> None:
        self._logs: deque[float] = deque(maxlen=window)

    def distance(self, norm: float) -> float:
        """Return how many deviations a norm is above the median, 0.0 while few are known; and keep it."""
        if norm == 0 or math.isnan(norm):
            return 0.0
        value, known = math.log(norm), self._logs
        distance = 0.0
        if len(known) >= self.ENOUGH:
            middle = median(known)
            spread = 1.4826 * median(abs(one - middle) for one in known) if math.isfinite(middle) else 0.0
            distance = (value - middle) / max(spread, self.LEAST)
        known.append(value)
        return 0.0 if math.isnan(distance) else distance

    @property
    def median(self) -> float | None:
        """The median of the norms in the window; None without any."""
        return math.exp(median(self._logs)) if self._logs else None

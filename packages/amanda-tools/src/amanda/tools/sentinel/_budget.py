"""The share of time that watching may take, kept by choosing the steps that are watched."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_ENOUGH = 3
"""Steps that were not watched, after which one may be."""
_BURST = 0.1
"""Share of a step that a watched one may spend on ops that are new."""
_STALL = 10
"""A watched step that took longer than this many times the tool's own work was held up by something else."""


class Budget:
    """Time spent on watching, and whether the next step may be watched.

    share: of the time since the beginning; None for all steps.

    The cost of a watched step is the longer of the time in the tool's own code, and the time of the step
    beyond the median of the others.  A step is watched once the time that has passed has earned the cost of
    the steps before, and the one that is expected.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.passed = self.spent = 0.0
        self._plain: deque[float] = deque(maxlen=31)
        self._costs: deque[float] = deque(maxlen=7)
        self._reserve = 0.0
        """Cost of analysing forward ops so far, until a step is watched to its end.

        Their backward ops cost about as much, all in one step.
        """

    def step_ended(self, seconds: float, inside: float, watched: bool, exhausted: bool = False) -> None:
        """Count a step; seconds: that it took, inside: of them in the tool's own code.

        exhausted: whether watching ended in its midst, at the allowance.
        """
        self.passed += seconds
        if not watched:
            self.spent += inside
            self._plain.append(seconds - inside)
            return
        beyond = seconds - median(self._plain) if self._plain else inside
        cost = max(inside, min(beyond, _STALL * inside))
        self.spent += cost
        self._costs.append(cost)
        self._reserve = self._reserve + cost if exhausted else 0.0

    @property
    def allowance(self) -> float:
        """The seconds after which a watched step analyses no further forward ops."""
        return math.inf if self.share is None else _BURST * median(self._plain)

    def allows(self) -> bool:
        """Return True if the next step may be watched."""
        if self.share is None:
            return True
        if len(self._plain) < _ENOUGH:
            return False
        expected = median(self._costs) if self._costs else self.allowance
        return self.spent + expected + self._reserve <= self.share * self.passed

    def interval(self, seconds: float) -> int:
        """Return the number of steps after which work of so many seconds may be done again."""
        if self.share is None or not self._plain:
            return 1
        return max(1, int(seconds / (0.5 * self.share * median(self._plain))) + 1)

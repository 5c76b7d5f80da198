"""The share of time that watching may take, kept by choosing the steps that are watched."""

from __future__ import annotations

from collections import deque
from statistics import median

_ENOUGH = 3
"""Steps that were not watched, of which the first watched one has to wait until its cost is known."""
_STALL = 10
"""A watched step that took longer than this many times the tool's own work was held up by something else."""


class Budget:
    """Time spent on watching, and whether the next step may be watched.

    share: of the time since the beginning; None for all steps.

    What watching costs is the longer of the time in the tool's own code, and what a watched step took beyond
    the median of the others.  The first step is watched; another one is once the time that has passed has
    earned what the steps before have cost, and what this one will.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.passed = self.spent = 0.0
        self._plain: deque[float] = deque(maxlen=31)
        self._costs: deque[float] = deque(maxlen=7)
        self._first: tuple[float, float] | None = None

    def step_ended(self, seconds: float, inside: float, watched: bool) -> None:
        """Count a step; seconds: that it took, inside: of them in the tool's own code."""
        self.passed += seconds
        if not watched:
            self.spent += inside
            self._plain.append(seconds - inside)
            if self._first is not None and len(self._plain) == _ENOUGH:
                self._count(*self._first)
        elif len(self._plain) < _ENOUGH and self.share is not None:
            self._first = seconds, inside
        else:
            self._count(seconds, inside)

    def _count(self, seconds: float, inside: float) -> None:
        """Count the cost of a watched step."""
        beyond = seconds - median(self._plain) if self._plain else inside
        cost = max(inside, min(beyond, _STALL * inside))
        self.spent += cost
        self._costs.append(cost)

    def allows(self) -> bool:
        """Return True if the next step may be watched."""
        if self.share is None:
            return True
        if self.passed and not self._costs:
            return False
        return self.spent + (median(self._costs) if self._costs else 0.0) <= self.share * self.passed

    def interval(self, seconds: float) -> int:
        """Return the number of steps after which work of so many seconds may be done again."""
        if self.share is None or not self._plain:
            return 1
        return max(1, int(seconds / (0.5 * self.share * median(self._plain))) + 1)

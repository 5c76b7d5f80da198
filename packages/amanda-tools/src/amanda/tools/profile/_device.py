"""Time on a device whose work runs behind the program's: marks in its queue, read when they have passed."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from amanda.tools.profile._place import Place


class DeviceClock(Protocol):
    """The clock of a device; nothing here waits for the device except `wait`."""

    def mark(self) -> Any:
        """Put a mark behind what was launched; None where that cannot be done now."""

    def passed(self, mark: Any) -> bool:
        """Return True if the device has reached a mark."""

    def wait(self, mark: Any) -> None:
        """Wait until it has."""

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one passed mark to another."""

    def free(self, mark: Any) -> None:
        """Take a mark back for another use."""


class DeviceTimes:
    """Pairs of marks around ops, and what the device took between them."""

    KEPT = 4096

    def __init__(self) -> None:
        self._pending: deque[tuple[DeviceClock, Place, Any, Any]] = deque()

    def add(self, clock: DeviceClock, place: Place, begin: Any, end: Any) -> None:
        """Note the marks of one execution; those that have passed are read once many are kept."""
        if begin is None or end is None:
            return
        self._pending.append((clock, place, begin, end))
        while len(self._pending) > self.KEPT and clock.passed(self._pending[0][3]):
            self._read()

    def settle(self) -> None:
        """Wait for all marks and read them."""
        while self._pending:
            clock, _, _, end = self._pending[0]
            clock.wait(end)
            self._read()

    def clear(self) -> None:
        """Forget them."""
        self._pending.clear()

    def _read(self) -> None:
        clock, place, begin, end = self._pending.popleft()
        place.device = (place.device or 0) + round(1e6 * clock.between(begin, end))
        clock.free(begin)
        clock.free(end)

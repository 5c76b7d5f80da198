"""Time on a device whose work runs behind the program's: marks in its queue, read when they have passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from amanda.tools.profile._op import OpProfile


class DeviceClock:
    """Puts marks around ops into the queue of a device, and adds the time between two marks to their op.

    record: puts a mark behind what was launched, a new one unless a former one is given, and returns it; None
    where that cannot be done now.  A mark has the methods of torch.cuda.Event.
    """

    KEPT = 4096

    def __init__(self, record: Callable[[Any], Any]) -> None:
        self._record = record
        self._free: list[Any] = []
        self._pending: deque[tuple[OpProfile, Any, Any]] = deque()

    def begin(self, place: OpProfile) -> Any:
        """Return the mark at which an op begins; None where there is none."""
        return self._record(self._free.pop() if self._free else None)

    def end(self, place: OpProfile, begun: Any) -> None:
        """Mark the end of an op; marks that have passed are read once many are kept."""
        ended = None if begun is None else self.begin(place)
        if ended is not None:
            self._pending.append((place, begun, ended))
        while len(self._pending) > self.KEPT and self._pending[0][2].query():
            self._read()

    def settle(self) -> None:
        """Wait for all marks and read them."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read()

    def clear(self) -> None:
        """Forget the marks."""
        self._pending.clear()

    def _read(self) -> None:
        place, begun, ended = self._pending.popleft()
        place.device = (place.device or 0) + round(1e6 * begun.elapsed_time(ended))
        self._free += (begun, ended)

"""Time on an asynchronous device, by events in its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from amanda.tools.profile._op import OpProfile


class DeviceClock:
    """A clock of events around ops in the queue of a device; the time between two is added to the op.

    record: records an event, the given one or for None a new one, and returns the event, or None if that is
    not possible now.  An event has the methods of torch.cuda.Event.
    """

    KEPT = 4096

    def __init__(self, record: Callable[[Any], Any]) -> None:
        self._record = record
        self._free: list[Any] = []
        self._pending: deque[tuple[OpProfile, Any, Any]] = deque()

    def begin(self, place: OpProfile) -> Any:
        """Return the event at which an op begins, or None."""
        return self._record(self._free.pop() if self._free else None)

    def end(self, place: OpProfile, begun: Any) -> None:
        """Record the end of an op; once many events are kept, read those that have completed."""
        ended = None if begun is None else self.begin(place)
        if ended is not None:
            self._pending.append((place, begun, ended))
        while len(self._pending) > self.KEPT and self._pending[0][2].query():
            self._read()

    def settle(self) -> None:
        """Wait for all events and read them."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read()

    def clear(self) -> None:
        """Forget the events."""
        self._pending.clear()

    def _read(self) -> None:
        place, begun, ended = self._pending.popleft()
        place.device = (place.device or 0) + round(1e6 * begun.elapsed_time(ended))
        self._free += (begun, ended)

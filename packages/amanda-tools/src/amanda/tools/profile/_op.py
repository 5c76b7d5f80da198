"""The profile of one op: its place in the program, and sums over its executions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

KEYS = ("phase", "type", "module", "source")
_SUMS = ("calls", "timed", "total", "own", "device", "allocated", "at_peak")
"""Fields that `together` adds up, without None."""


@dataclass(eq=False)
class OpProfile:
    """One op, forward or backward, with the sums over its recorded executions; times in nanoseconds.

    name: the framework's own ("AddmmBackward0").
    id: of 64 bits; op_id: the id of the forward op, which is the same for a forward op.
    total: time between begin and end.  own: total without the ops within this op.
    calls: executions that ended; timed: those of them whose begin is known.
    device: time on the device, None without a device.
    allocated: bytes of the tensors that the op made; None if they were not followed.
    at_peak: bytes of those that were alive at the peaks, in a result.
    index: among all ops.  kernels: by name and device, calls and nanoseconds.
    recomputation: the profile of executions that run again in the backward pass; None while there are none.
    runs_others: whether the time of the ops within cannot be told from the op's own.
    """

    phase: str
    type: str
    module: str
    source: str
    name: str = ""
    id: int = 0
    op_id: int = 0
    calls: int = 0
    timed: int = 0
    total: int = 0
    own: int = 0
    least: int = 0
    most: int = 0
    device: int | None = None
    allocated: int | None = None
    at_peak: int = 0
    runs_others: bool = False
    index: int = 0
    kernels: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    recomputation: OpProfile | None = None

    def add(self, took: int, inside: int) -> None:
        """Add one execution, with the time of the ops within it."""
        self.calls += 1
        self.timed += 1
        self.total += took
        if not self.runs_others:
            self.own += took - inside
        if took > self.most:
            self.most = took
        if took < self.least or self.timed == 1:
            self.least = took

    def clear(self) -> None:
        """Forget the executions."""
        self.calls = self.timed = self.total = self.own = self.least = self.most = 0
        self.device = self.allocated = None
        self.kernels = {}

    @property
    def names(self) -> dict[str, str]:
        """Return the keys of rows, with the op's values."""
        return {key: getattr(self, key) for key in KEYS}

    @property
    def about(self) -> dict[str, str]:
        """Return the keys, the name and the id in hexadecimal digits, for files."""
        return {**self.names, "name": self.name, "id": f"{self.id:016x}"}


def together(places: Sequence[OpProfile]) -> OpProfile:
    """Return a new profile with the sums of several, and the names of the first."""
    made = replace(places[0], kernels={}, recomputation=None)
    for name in _SUMS:
        known = [value for place in places if (value := getattr(place, name)) is not None]
        setattr(made, name, sum(known) if known else None)
    made.least = min((place.least for place in places if place.timed), default=0)
    made.most = max(place.most for place in places)
    for kernel, (calls, took) in (item for place in places for item in place.kernels.items()):
        before = made.kernels.get(kernel, (0, 0))
        made.kernels[kernel] = [before[0] + calls, before[1] + took]
    return made

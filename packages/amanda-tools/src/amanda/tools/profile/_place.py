"""The record of one op: where it is, and what its executions came to."""

from __future__ import annotations

from dataclasses import dataclass, field

KEYS = ("phase", "type", "module", "source")


@dataclass(eq=False)
class Place:
    """One op, forward or backward, with the sums over its recorded executions; times in nanoseconds.

    name: what the framework calls it ("AddmmBackward0").
    id: 64 bits that name it; op_id: its forward op's, the same where it is one.
    total: time between its begin and end.  own: without the ops within it.
    calls: executions that ended; timed: those of them whose begin is known.
    device: time on the device, None where there is none.
    allocated: bytes of the tensors that it made; None where nobody looked.
    index: its place among all.  kernels: by name and device, how often each ran and for how long.
    runs_others: whether ops within it have times of their own that cannot be told from its own.
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
    runs_others: bool = False
    index: int = 0
    kernels: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, took: int, inside: int) -> None:
        """One more execution, with the time of the ops within it."""
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
        """Keys of the place in rows."""
        return {key: getattr(self, key) for key in KEYS}

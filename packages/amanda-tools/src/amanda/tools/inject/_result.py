"""What was injected where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.results import Column, Result, shortened


@dataclass(frozen=True)
class Injection:
    """One element that was changed.

    op: id of the op, forward or backward.  execution: which one of that op, from 0.
    tensor: e.g. "outputs[0]".  element: its index in the tensor.  bits: positions that were hit, 0 the
    least significant; empty for faults of values.  old, new: the element before and after.
    """

    phase: str
    type: str
    module: str
    source: str
    op: int
    execution: int
    tensor: str
    dtype: str
    element: tuple[int, ...]
    bits: tuple[int, ...]
    old: Any
    new: Any


class InjectResult(Result):
    """Every element that was changed, in the order of injection."""

    name: ClassVar[str] = "inject"
    title = "Injected faults"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)), Column("op"), Column("execution", number=True),
        Column("tensor"), Column("dtype"), Column("element"), Column("bits"),
        Column("old", number=True), Column("new", number=True),
    )  # fmt: skip

    def __init__(
        self, injections: Sequence[Injection], total: int, executions: int, seen: Mapping[str, bool]
    ) -> None:
        self.injections = tuple(injections)
        self.total = total
        self.executions = executions
        self._seen = dict(seen)

    def counts(self, key: str) -> dict[Any, int]:
        """Return the number of injections for each value of "phase", "type", "module", "dtype" and so on."""
        return dict(Counter(getattr(one, key) for one in self.injections))

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each element."""
        return [
            (one.phase, one.type, one.module, one.source, f"{one.op:#018x}", one.execution, one.tensor,
             one.dtype, " ".join(map(str, one.element)), " ".join(map(str, one.bits)),
             plain(one.old), plain(one.new))
            for one in self.injections
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the number of all injections, also of those that are not in the rows."""
        return {"injected": self.total, "executions": self.executions}

    def notes(self) -> Sequence[str]:
        """Return the number of injections, and the ops that were met if none was selected."""
        notes = [f"{self.total:,} elements changed in {self.executions:,} executions of the selected ops."]
        if self.total > len(self.injections):
            notes.append(f"The first {len(self.injections):,} are kept; `limit` says how many.")
        if self._seen and not any(self._seen.values()):
            notes.append(f"No op was selected; there were {', '.join(sorted(self._seen))}.")
        return notes


def exported(injection: Injection) -> dict[str, Any]:
    """An injection as plain values."""
    return {**asdict(injection), "op": f"{injection.op:#018x}",
            "old": plain(injection.old), "new": plain(injection.new)}  # fmt: skip


def plain(number: Any) -> Any:
    """A number as JSON knows it: a string where it is complex or not finite."""
    if isinstance(number, complex) or (isinstance(number, float) and not math.isfinite(number)):
        return str(number)
    return number

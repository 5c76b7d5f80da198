"""The injected faults, and their places."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.results import Column, Result, shortened


@dataclass(frozen=True)
class Injection:
    """One changed element.

    op: id of the op, forward or backward.  execution: number of the op's execution, from 0.
    tensor: e.g. "outputs[0]".  element: index in the tensor.  bits: positions of changed bits, 0 the least
    significant; empty for faults of values.  old, new: the element before and after.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON; complex numbers, NaN and Inf are strings."""
        told = {**asdict(self), "op": f"{self.op:#018x}"}
        for name in ("old", "new"):
            if isinstance(told[name], complex) or not math.isfinite(told[name]):
                told[name] = str(told[name])
        return told


class InjectResult(Result):
    """A row for each changed element, in the order of injection.

    total: number of changed elements.  left: types of the analysed ops, if none was selected.
    """

    name: ClassVar[str] = "inject"
    title = "Injected faults"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)), Column("op"), Column("execution", number=True),
        Column("tensor"), Column("dtype"), Column("element"), Column("bits"),
        Column("old", number=True), Column("new", number=True),
    )  # fmt: skip

    def __init__(
        self, injections: Sequence[Injection], total: int, executions: int, left: Collection[str] = ()
    ) -> None:
        self.injections = tuple(injections)
        self.total = total
        self.executions = executions
        self._left = sorted(left)

    def counts(self, key: str) -> dict[Any, int]:
        """Return the number of injections by the value of a field: "phase", "type", "module", "bits"."""
        return dict(Counter(getattr(one, key) for one in self.injections))

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each element."""
        return [
            tuple(" ".join(map(str, one)) if isinstance(one, tuple) else one for one in told.values())
            for told in (injection.to_dict() for injection in self.injections)
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return the numbers of changed elements, including those without a row, and of executions."""
        return {"injected": self.total, "executions": self.executions}

    def notes(self) -> Sequence[str]:
        """Return sentences on the number of elements, and on the types of ops if none was selected."""
        notes = [f"{self.total:,} elements changed in {self.executions:,} executions of the selected ops."]
        if self.total > len(self.injections):
            notes.append(f"The first {len(self.injections):,} are kept; `limit` says how many.")
        if self._left:
            notes.append(f"No op was selected; there were {', '.join(self._left)}.")
        return notes

"""The result of a dump: a row for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from amanda.tools.dump._entry import Entry, Op
from amanda.tools.results import Column, Result, amount, shortened


class DumpResult(Result):
    """The entries of a dump, in the order of execution.

    failure: why the folder lacks what came last; "" if it lacks nothing.
    """

    name: ClassVar[str] = "dump"
    title = "Dumped tensors"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"),
        Column("module", show=partial(shortened, width=24)),
        Column("source", show=partial(shortened, width=24)),
        Column("tensor"), Column("execution", number=True, shown=False), Column("dtype"),
        Column("shape", show=lambda shape: "x".join(map(str, shape)) or "scalar"),
        *(Column(name, show="{:.4g}".format, number=True) for name in ("mean", "std", "min", "max")),
        Column("NaN", show="{:,}".format, number=True), Column("Inf", show="{:,}".format, number=True),
        Column("file", show=lambda name: name.removeprefix("tensors-").partition(".")[0]),
    )  # fmt: skip

    def __init__(
        self, folder: Path, ops: Sequence[Op], entries: Sequence[Entry], kept: int, failure: str = ""
    ) -> None:
        self.folder, self.ops, self.entries, self._kept = folder, list(ops), list(entries), kept
        self.failure = failure

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each tensor."""
        return [self._row(self.ops[entry.op], entry) for entry in self.entries]

    def _row(self, op: Op, entry: Entry) -> tuple[Any, ...]:
        told = entry.summary.statistics
        moments = (told.mean, told.std, told.least, told.most) if told.count else (None,) * 4
        return (
            op.phase, op.type, op.module, op.source, f"{entry.role} {entry.position}", entry.execution,
            entry.dtype, list(entry.shape), *moments, told.nan, told.inf + told.negative_inf, entry.file,
        )  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return where the dump is, and how many bytes of tensors it has."""
        return {"folder": str(self.folder), "bytes": self._kept}

    def notes(self) -> Sequence[str]:
        """Return where the tensors are, and which were left out."""
        full = sum(entry.file is not None for entry in self.entries)
        notes = [f"{full:,} of {len(self.entries):,} tensors, {amount(self._kept, 'B')}, in {self.folder}."]
        left: dict[str, int] = {}
        for entry in self.entries:
            if entry.left_out is not None:
                left[entry.left_out] = left.get(entry.left_out, 0) + 1
        notes += [f"{count:,} more are summaries alone because of {why}." for why, count in left.items()]
        if self.failure:
            notes.append(f"The folder lacks what came last: {self.failure}.")
        return notes

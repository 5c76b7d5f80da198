"""What `amanda instrument` has done: which routines are in the file, by the type of op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from amanda import Instrumented
from amanda.tools.results import Column, Result


class InstrumentedResult(Result):
    """A row for each type of op and tool, with how many routines are at such ops."""

    name: ClassVar[str] = "instrument"
    columns: ClassVar[Sequence[Column]] = (
        Column("type"),
        Column("tool"),
        Column("before", total=True),
        Column("instead", total=True),
        Column("after", total=True),
        Column("stored", total=True),
    )

    def __init__(self, done: Instrumented, model: Path) -> None:
        self.title = f"{done.kind} {done.path}"
        self._done = done
        self._model = model

    def rows(self) -> Sequence[Sequence[Any]]:
        """Types and tools with their numbers of routines; a stored one is counted as that alone."""
        done = self._done.inlined
        counted = Counter(
            (one.type, one.tool, "stored" if one.stored else _WHERE[one.action]) for one in done
        )
        places = [column.name for column in self.columns[2:]]
        kinds = dict.fromkeys((one.type, one.tool) for one in done)
        return [(type, tool, *(counted[type, tool, place] for place in places)) for type, tool in kinds]

    def notes(self) -> Sequence[str]:
        """How many ops there were, and what could not be instrumented."""
        done = self._done
        stored = any(one.stored for one in done.inlined)
        return [
            f"{done.analysed} ops of {self._model} were analysed; the copy has {len(done.inlined)} routines.",
            *(["Stored is what a routine makes of constants alone: it was computed now."] if stored else []),
            *(f"Not instrumented: {one.what}: {one.reason}." for one in done.left),
        ]

    def facts(self) -> Mapping[str, Any]:
        """The files, and each routine."""
        return {
            "model": str(self._model), "out": str(self._done.path), "kind": self._done.kind,
            "analysed": self._done.analysed, "routines": [one._asdict() for one in self._done.inlined],
            "left": [one._asdict() for one in self._done.left],
        }  # fmt: skip


_WHERE = {"insert_before_op": "before", "replace_op": "instead", "insert_after_op": "after"}

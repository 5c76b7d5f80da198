"""Executed ops, and how many of them hooks would have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from amanda.tools.mapping import VOCABULARY
from amanda.tools.results import Column, PlacesResult

KEYS = ("phase", "type", "module", "source", "model")
_COUNTS = ("calls", "whole", "entered", "left")


@dataclass
class OpCoverage:
    """One op, forward or backward.

    model: class of the outermost module that calls the op.  calls: number of executions.  entered: executions
    whose inputs a hook would have seen.  left: those whose outputs.  whole: those with both.
    """

    phase: str
    type: str
    module: str
    source: str
    model: str
    calls: int = 0
    whole: int = 0
    entered: int = 0
    left: int = 0


class CoverageResult(PlacesResult[OpCoverage]):
    """Executions of ops, and those that hooks of modules would have seen.

    places: one entry for each op.  by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "coverage"
    keys: ClassVar[Sequence[str]] = KEYS
    place = OpCoverage
    summed = _COUNTS
    counted: ClassVar[Sequence[Column]] = (
        *(Column(name, show="{:,}".format, total=True) for name in ("executed", "hooked", "entered", "left")),
        Column("share", show="{:.1%}".format, number=True, unit="share"),
    )

    def __init__(self, places: Iterable[OpCoverage], by: Sequence[str] = KEYS) -> None:
        self.places = [place for place in places if place.calls]
        self.tell_by(by, "Ops that hooks of modules see")

    def total(self, what: str = "calls", phase: str | None = None) -> int:
        """Return the sum of "calls", "whole", "entered" or "left", of one phase or of both."""
        return sum(getattr(place, what) for place in self.places if phase in (None, place.phase))

    def share(self, phase: str | None = None) -> float:
        """Return the share of executions that hooks see whole, from 0 to 1; 1 if nothing was executed."""
        calls = self.total("calls", phase)
        return self.total("whole", phase) / calls if calls else 1.0

    @property
    def types(self) -> Mapping[str, int]:
        """Types of forward ops with their executions, the most frequent first."""
        counts = Counter[str]()
        for place in self.places:
            if place.phase == "forward":
                counts[place.type] += place.calls
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def without_word(self) -> Mapping[str, int]:
        """Executions by the framework's own type, of ops for which StandardMapping has no word."""
        return {kind: calls for kind, calls in self.types.items() if kind not in VOCABULARY}

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, those with most executions first."""
        rows = []
        for key, places in self.grouped(self.places).items():
            sums = [sum(getattr(place, count) for place in places) for count in _COUNTS]
            rows.append((*key, *sums, sums[1] / sums[0]))
        return sorted(rows, key=lambda row: (-row[len(self._by)], row[: len(self._by)]))

    def facts(self) -> Mapping[str, Any]:
        """Return totals of each phase, the types of ops, and each op."""
        totals = {
            phase: {count: self.total(count, phase) for count in _COUNTS}
            for phase in dict.fromkeys(place.phase for place in self.places)
        }
        return {
            "totals": totals, "types": self.types, "without_word": self.without_word, **super().facts()
        }  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return the share of each phase, and types for which StandardMapping has no word."""
        notes = [
            f"Hooks at leaf modules see {self.total('whole', phase):,} of {self.total('calls', phase):,} "
            f"{phase} ops ({self.share(phase):.1%}): the ops that are alone in a call of a leaf module."
            for phase in ("forward", "backward")
            if self.total("calls", phase)
        ]
        if missing := self.without_word:
            listed = ", ".join(f"{kind} ({calls})" for kind, calls in missing.items())
            notes.append(f"StandardMapping has no word for {listed}.")
        return notes

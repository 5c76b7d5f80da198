"""What is pruned: a row for each weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda.tools.prune._weight import PrunedWeight
from amanda.tools.results import Column, Result, not_met, shortened


class PruneResult(Result):
    """The weights with the share of their elements that is dropped.

    left: weights that were selected and are not pruned, by module and type, and why.
    elements_left: how many elements those have that a parameter holds.
    waiting: names of state that was loaded and belongs to no weight that was met.
    """

    name: ClassVar[str] = "prune"
    title = "Pruned weights"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("shape"), Column("layout"),
        Column("weights", show="{:,}".format, total=True), Column("zeros", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"), Column("pattern"),
    )  # fmt: skip

    def __init__(
        self,
        weights: Iterable[PrunedWeight],
        pattern: str,
        left: Mapping[str, str],
        passed: str = "",
        waiting: Sequence[str] = (),
        elements_left: int = 0,
    ) -> None:
        self._rows = [
            ("forward", one.type, one.module, one.source, "x".join(map(str, one.shape)), one.layout or "",
             one.size, one.zeros, one.zeros / max(one.size, 1), pattern)
            for one in weights
        ]  # fmt: skip
        self.left = dict(left)
        self.elements_left = elements_left
        self.waiting = tuple(waiting)
        self._passed = passed

    @property
    def sparsity(self) -> float:
        """The share of the elements of pruned weights that is dropped."""
        return self.zeros / max(self.elements, 1)

    @property
    def share(self) -> float:
        """The share of all elements that were selected that is dropped, also of those that are left."""
        return self.zeros / max(self.elements + self.elements_left, 1)

    @property
    def elements(self) -> int:
        """How many elements the weights have."""
        return sum(row[6] for row in self._rows)

    @property
    def zeros(self) -> int:
        """How many of them are dropped."""
        return sum(row[7] for row in self._rows)

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each weight, in the order of first use."""
        return self._rows

    def facts(self) -> Mapping[str, Any]:
        """Totals, and what was left."""
        return {
            "tensors": len(self._rows), "elements": self.elements, "zeros": self.zeros,
            "sparsity": self.sparsity, "left": self.left, "elements_left": self.elements_left,
            "share": self.share,
        }  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Totals, and what was left."""
        count = len(self._rows)
        notes = [
            f"{count} weight{'s' * (count != 1)} of {self.elements:,} elements, sparsity {self.sparsity:.4f}."
        ]
        if self.elements_left:
            selected = self.elements + self.elements_left
            notes.insert(
                0,
                f"{self.share:.4f} of the {selected:,} elements that were selected are zero: "
                f"{self.elements_left:,} are left as they are.",
            )
        notes += [f"{self._passed}."] if self._passed else []
        notes += not_met("masks", self.waiting)
        return notes + [f"{place} is left as it is: {why}." for place, why in self.left.items()]

"""The result of pruning: a row for each weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column
from amanda.tools.weights import WeightResult

if TYPE_CHECKING:
    from amanda.tools.prune._tool import PruneTool


class PruneResult(WeightResult):
    """The weights with the share of their elements that is dropped.

    zeros: number of elements of pruned weights that are dropped.  importance: what is dropped first.
    dense: weights that `finalize(model, semi_structured=True)` has left dense, by path, and why.
    """

    name: ClassVar[str] = "prune"
    title = "Pruned weights"
    state: ClassVar[tuple[str, str]] = ("masks", "/mask")
    columns: ClassVar[Sequence[Column]] = (
        *WeightResult.columns, Column("zeros", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"), Column("pattern"),
    )  # fmt: skip

    def __init__(self, tool: PruneTool) -> None:
        self._pattern, self.importance = tool.pattern, tool.importance
        super().__init__(tool)
        self.dense: dict[str, str] = {}
        self.zeros: int = sum(one.zeros for one in tool.weights)

    def row(self, weight: Any) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        zeros = weight.zeros
        return *super().row(weight), zeros, zeros / max(weight.size, 1), self._pattern

    @property
    def sparsity(self) -> float:
        """The share of the elements of pruned weights that is dropped."""
        return self.zeros / max(self.elements, 1)

    @property
    def share(self) -> float:
        """The share of all elements that were selected that is dropped, also of weights that are left."""
        return self.zeros / max(self.elements + self.elements_left, 1)

    def facts(self) -> Mapping[str, Any]:
        """Return totals, and what was left."""
        return {
            **super().facts(),
            "zeros": self.zeros,
            "sparsity": self.sparsity,
            "share": self.share,
            "importance": self.importance,
        }

    def notes(self) -> Sequence[str]:
        """Return totals, and what was left."""
        notes = [f"{self.counted}, sparsity {self.sparsity:.4f}."]
        if self.elements_left:
            notes.insert(
                0,
                f"{self.share:.4f} of the {self.elements + self.elements_left:,} elements that were selected "
                f"are zero: {self.elements_left:,} are left as they are.",
            )
        notes += [f"{path} stays dense: {why}." for path, why in self.dense.items()]
        return notes + self.notes_on_skipped()

"""Result of a tool that changes weights: a row for each weight, and reasons for skipped weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, Result, not_met, shortened
from amanda.tools.select import as_remarks
from amanda.tools.weights._weight import Weight

if TYPE_CHECKING:
    from amanda.tools.weights._tool import WeightTool


class WeightResult(Result):
    """The weights that a tool changes, in the order of their first reads; a subclass adds columns.

    elements: number of elements of these weights.
    left: reasons why selected weights are unchanged, by type and module of the op.
    elements_left: number of elements of those weights that are parameters.
    waiting: names of loaded state that belongs to no weight read so far.
    model: the model that `finalize` wrote; None in other results.
    """

    model: Any = None
    name: ClassVar[str] = "weights"
    title = "Changed weights"
    state: ClassVar[tuple[str, str]] = ("state", "")
    """Display name of the state of weights, and the text that names of that state contain."""
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("shape"), Column("layout"),
        Column("weights", show="{:,}".format, total=True),
        Column("parameter", show=partial(shortened, width=32)),
    )  # fmt: skip

    def __init__(self, tool: WeightTool[Any]) -> None:
        weights = tool.weights
        self._rows = [self.row(weight) for weight in weights]
        self.elements: int = sum(weight.size for weight in weights)
        self.left = dict(weights.reasons)
        self.elements_left: int = sum(weights.skipped_elements.values())
        waiting = tool.waiting_state() if self._rows else []
        self.waiting = tuple(name for name in waiting if self.state[1] in name)
        self.remarks = as_remarks(tool.unmatched())
        self._empty_reason = weights.empty_reason

    def row(self, weight: Weight) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        shape = "x".join(map(str, weight.shape))
        return (
            "forward", weight.type, weight.module, weight.source, shape, weight.layout or "", weight.size,
            weight.path,
        )  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each weight."""
        return self._rows

    def facts(self) -> Mapping[str, Any]:
        """Return totals, and reasons for skipped weights."""
        return {
            "tensors": len(self._rows), "elements": self.elements, "left": self.left,
            "elements_left": self.elements_left,
        }  # fmt: skip

    @property
    def counted(self) -> str:
        """The number of weights and of their elements, in words."""
        count = len(self._rows)
        return f"{count} weight{'s' * (count != 1)} of {self.elements:,} elements"

    @property
    def leading(self) -> int:
        """Number of notes at the top: totals, and elements of skipped weights."""
        return 1 + bool(self.elements_left)

    def notes(self) -> Sequence[str]:
        """Return totals, and reasons for skipped weights."""
        notes = [f"{self.counted}."]
        if self.elements_left:
            notes.append(f"{self.elements_left:,} elements that were selected are left as they are.")
        return notes + self.notes_on_skipped()

    def notes_on_skipped(self) -> list[str]:
        """Return a sentence for each skipped weight, and for loaded state of no weight."""
        empty = [f"{self._empty_reason}."] if self._empty_reason else []
        skipped = [f"{place} is left as it is: {why}." for place, why in self.left.items()]
        return [*empty, *not_met(self.state[0], self.waiting), *skipped]

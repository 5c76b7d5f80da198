"""The result of a tool that changes weights: a row for each weight, and what was left."""

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
    """The weights that a tool changes, in the order in which they were met; a subclass adds columns.

    elements: number of elements of these weights.
    left: weights that were selected and are not changed, by type and module of the op, and why.
    elements_left: how many elements those have that a parameter holds.
    waiting: names of loaded state that belongs to no weight that was met.
    model: what `finalize` has given other weights; None of another result.
    """

    model: Any = None
    name: ClassVar[str] = "weights"
    title = "Changed weights"
    state: ClassVar[tuple[str, str]] = ("state", "")
    """Name, for people, of what is kept of weights; and what is in the names of that state."""
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("shape"), Column("layout"),
        Column("weights", show="{:,}".format, total=True),
        Column("parameter", show=partial(shortened, width=32)),
    )  # fmt: skip

    def __init__(self, tool: WeightTool[Any]) -> None:
        weights = tool.weights
        self._rows = [self.row(one) for one in weights]
        self.elements: int = sum(one.size for one in weights)
        self.left = dict(weights.reasons)
        self.elements_left: int = sum(weights.left.values())
        waiting = tool.waiting_state() if self._rows else []
        self.waiting = tuple(name for name in waiting if self.state[1] in name)
        self.remarks = as_remarks(tool.unmatched())
        self._passed = weights.passed

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
        """Return totals, and what was left."""
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
        """The totals come first, and how much is left."""
        return 1 + bool(self.elements_left)

    def notes(self) -> Sequence[str]:
        """Return totals, and what was left."""
        notes = [f"{self.counted}."]
        if self.elements_left:
            notes.append(f"{self.elements_left:,} elements that were selected are left as they are.")
        return notes + self.told_left()

    def told_left(self) -> list[str]:
        """Return a sentence for each weight that was left, and for state that no weight has asked for."""
        passed = [f"{self._passed}."] if self._passed else []
        left = [f"{place} is left as it is: {why}." for place, why in self.left.items()]
        return [*passed, *not_met(self.state[0], self.waiting), *left]

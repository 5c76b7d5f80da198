"""Results: the points of a tool, and the metrics of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, PlottedResult, Result, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(eq=False)
class Patched:
    """One point: an input or output of a module or an op.

    executions: of the point.  changed: executions with a changed value.  skipped: selected executions in
    which none of the selected positions existed.
    """

    phase: str
    type: str
    module: str
    source: str
    point: str
    executions: int = field(default=0, init=False)
    changed: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)


class PatchResult(Result):
    """A row for each point, in the order of the first executions."""

    name: ClassVar[str] = "patch"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("point"),
        Column("executions", total=True, merge="sum"), Column("changed", total=True, merge="sum"),
        Column("skipped", total=True, merge="sum"),
    )  # fmt: skip

    def __init__(self, patched: Sequence[Patched], title: str) -> None:
        self.patched, self.title = tuple(patched), title

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each point."""
        return [astuple(point) for point in self.patched]

    def notes(self) -> Sequence[str]:
        """Return a sentence on executions in which no selected position existed."""
        skipped = sum(point.skipped for point in self.patched)
        return [f"At {skipped:,} executions no selected position existed."] if skipped else []


class PatchSweep(PlottedResult):
    """The metric with an intervention at each place.

    along: second dimension of the sweep, "positions" or "heads"; None for modules only.  baseline: the
    metric without an intervention.
    """

    name: ClassVar[str] = "patch_sweep"

    def __init__(
        self, rows: Sequence[tuple[str, int | None, float]], along: str | None, baseline: float
    ) -> None:
        self._rows, self._along, self.baseline = tuple(rows), along, baseline
        second = (Column(along.removesuffix("s"), number=True),) if along else ()
        metric = (Column("metric", number=True, show="{:.6g}".format),)
        self.columns = (Column("module"), *second, *metric)  # type: ignore[misc]
        self.title = f"Metric with an intervention; without: {baseline:.6g}"

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each place, in the order of the sweep."""
        return [row if self._along else (row[0], row[2]) for row in self._rows]

    def facts(self) -> Mapping[str, Any]:
        """Return the metric without an intervention."""
        return {"baseline": self.baseline, "along": self._along}

    def draw(self, axes: Axes) -> None:
        """Draw a heat map: a row for each module, a column for each position or head."""
        modules = list(dict.fromkeys(row[0] for row in self._rows))
        columns = list(dict.fromkeys(row[1] for row in self._rows))
        metrics = {row[:2]: row[2] for row in self._rows}
        table = [[metrics[module, column] for column in columns] for module in modules]
        reach = max((abs(row[2] - self.baseline) for row in self._rows), default=0.0) or 1.0
        image = axes.imshow(
            table, cmap="RdBu", aspect="auto", vmin=self.baseline - reach, vmax=self.baseline + reach
        )
        axes.set_yticks(range(len(modules)), modules)
        axes.set_xticks(range(len(columns)), [str(column) if self._along else "" for column in columns])
        axes.set_xlabel(self._along.removesuffix("s") if self._along else "")
        assert axes.figure is not None
        axes.figure.colorbar(image, ax=axes, label=f"metric; white: {self.baseline:.6g}")

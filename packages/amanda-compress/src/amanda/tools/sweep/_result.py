"""Measurements: a row for each op at each level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, PlottedResult, shortened
from amanda.tools.sweep._errors import SweepError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = 20


@dataclass(frozen=True)
class Site:
    """An op at which the tool acts; name: the module's path and the op, by which it is known again."""

    name: str
    type: str
    module: str
    source: str
    op_ids: set[int] = field(default_factory=set, compare=False)


ALL = Site("", "all", "", "")
"""All ops together."""


@dataclass(frozen=True)
class Point:
    """One evaluation; metric: None where it failed, which `error` tells.

    cost: what a function given as `cost` said with the tool in force; None without one.
    """

    site: Site
    level: float
    metric: float | None
    error: str = ""
    seconds: float = 0.0
    cost: float | None = None


class SweepResult(PlottedResult):
    """The metric of each op alone at each level, and of all together.

    dense: the metric without a tool; drop: how far another is below it.  complete: whether all was measured.
    """

    name: ClassVar[str] = "sweep"

    def __init__(
        self, points: Sequence[Point], dense: float | None, level: str, metric: str, complete: bool
    ) -> None:
        self.points, self.dense, self.level, self.metric = tuple(points), dense, level, metric
        self.complete = complete
        told = "nothing was measured" if dense is None else f"{dense:.4g} without"
        self.title = f"{metric} against {level}, one op at a time: {told}"
        number = partial(Column, number=True, show="{:.4g}".format)
        text = partial(Column, show=partial(shortened, width=36))
        self.columns = (  # type: ignore[misc]
            Column("phase", shown=False), Column("type"), text("module"), text("source"),
            Column("op", shown=False), number(level), number(metric), number("drop"), text("error"),
        )  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return all ops together first, then op by op, as they are executed."""
        return [
            ("forward", one.site.type, one.site.module, one.site.source, one.site.name, one.level, one.metric,
             self._drop(one), one.error)
            for one in self.points
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Say what a drop is, and if something is missing."""
        notes = [f"drop is {self.metric} without the tool minus with it."]
        if not self.complete:
            notes.append("The sweep was not finished; run() goes on with it.")
        elif all(one.site is ALL for one in self.points):
            notes.append("The tool acted at no op.")
        return notes

    def facts(self) -> Mapping[str, Any]:
        """Return what level and metric are called, and the metric without a tool."""
        return {"level": self.level, "metric": self.metric, "dense": self.dense, "complete": self.complete}

    def _drop(self, point: Point) -> float | None:
        return None if point.metric is None or self.dense is None else self.dense - point.metric

    def within(self, drop: float) -> dict[str, float]:
        """Return by op, as `Site.name`, the last level up to which the metric drops at most so much.

        Levels are in the order in which they were given, from mild to harsh; an op that cannot bear the first
        is not in it. It says what each op bears alone: together they may lose more.
        Raises SweepError for a drop that is no number.
        """
        if not isinstance(drop, (int, float)) or isnan(drop):
            raise SweepError(f"drop is {drop!r}; give a number, such as 0.01")
        found: dict[str, float] = {}
        lost: set[str] = set()
        for point in self.points:
            fallen, name = self._drop(point), point.site.name
            if fallen is None or fallen > drop or name in lost:
                lost.add(name)
            elif point.site is not ALL:
                found[name] = point.level
        return found

    def draw(self, axes: Axes) -> None:
        """Draw a line for each op, or for those that lose most of many, and a thick one for all together."""
        lines: dict[Site, list[Point]] = {}
        for point in self.points:
            if point.metric is not None:
                lines.setdefault(point.site, []).append(point)
        together = lines.pop(ALL, [])
        worst = sorted(lines, key=lambda site: min(point.metric or 0.0 for point in lines[site]))[:_LINES]
        for site in worst:
            name = site.module or site.name
            axes.plot(*_line(lines[site]), marker="o", markersize=3, linewidth=1, label=name)
        if together:
            axes.plot(*_line(together), color="black", linewidth=2.5, label="all together")
        if self.dense is not None:
            axes.axhline(self.dense, color="gray", linestyle="--", linewidth=1, label="without")
        axes.set_xlabel(self.level)
        axes.set_ylabel(self.metric)
        if lines or together:
            axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _line(points: Sequence[Point]) -> tuple[Any, Any]:
    return [one.level for one in points], [one.metric for one in points]

"""Measurements of a sweep, as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.errors import AmandaError
from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class SweepError(AmandaError, ValueError, module="amanda.tools.sweep"):
    """A sweep that cannot be made."""


_MOST_LINES = 20


@dataclass(frozen=True)
class Site:
    """An op at which the tool acts.  name: path of the module and type of the op, the same in each run."""

    name: str
    type: str
    module: str
    source: str
    op_ids: set[int] = field(default_factory=set, compare=False)


ALL = Site("", "all", "", "")
"""All ops together."""


@dataclass(frozen=True)
class Point:
    """One evaluation.  metric: None where the evaluation failed; `error` says why.

    cost: the result of the function that was passed as `cost`, with the tool in force; None without one.
    """

    site: Site
    level: float
    metric: float | None
    error: str = ""
    seconds: float = 0.0
    cost: float | None = None


class SweepResult(PlottedResult):
    """The metric of each op alone at each level, and of all together.

    dense: the metric without a tool.  complete: True if every point was measured.
    """

    name: ClassVar[str] = "sweep"

    def __init__(
        self, points: Sequence[Point], dense: float | None, level: str, metric: str, complete: bool
    ) -> None:
        self.points, self.dense, self.level, self.metric = tuple(points), dense, level, metric
        self.complete = complete
        baseline = "nothing was measured" if dense is None else f"{dense:.4g} without"
        self.title = f"{metric} against {level}, one op at a time: {baseline}"
        number_column = partial(Column, number=True, show="{:.4g}".format)
        text_column = partial(Column, show=partial(shortened, width=36))
        # By instance: the names of level and metric are the user's.
        self.columns = (  # type: ignore[misc]
            Column("phase", shown=False), Column("type"), text_column("module"), text_column("source"),
            Column("op", shown=False), number_column(level), number_column(metric), number_column("drop"),
            text_column("error"),
        )  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return all ops together first, then op by op, as they are executed."""
        return [
            ("forward", point.site.type, point.site.module, point.site.source, point.site.name, point.level,
             point.metric, self._drop(point), point.error)
            for point in self.points
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return the meaning of a drop, and a sentence if points are missing."""
        notes = [f"drop is {self.metric} without the tool minus with it."]
        if not self.complete:
            notes.append("The sweep was not finished; run(), or --resume with the same file, does the rest.")
        elif all(point.site is ALL for point in self.points):
            notes.append("The tool acted at no op.")
        return notes

    def _facts(self) -> Mapping[str, Any]:
        """Return the names of level and metric, and the metric without a tool."""
        return {"level": self.level, "metric": self.metric, "dense": self.dense, "complete": self.complete}

    def _drop(self, point: Point) -> float | None:
        """Return the metric without a tool minus that of a point; None if either is missing."""
        return None if point.metric is None or self.dense is None else self.dense - point.metric

    def within(self, drop: float) -> dict[str, float]:
        """Return the harshest level of each op within a drop of the metric, by `Site.name`.

        Levels are in the order of the sweep, from mild to harsh; an op whose metric drops more at the first
        level is missing. Each op is measured alone: changed together, ops may lose more.

        Args:
            drop: Largest loss of the metric, in its own unit.

        Raises:
            SweepError: For a drop that is not a number.
        """
        if not isinstance(drop, (int, float)) or isnan(drop):
            raise SweepError(f"drop is {drop!r}; give a number, such as 0.01")
        harshest_levels: dict[str, float] = {}
        exceeding_sites: set[str] = set()
        for point in self.points:
            point_drop, name = self._drop(point), point.site.name
            if point_drop is None or point_drop > drop or name in exceeding_sites:
                # From the first level with a larger drop on: a harsher one that does better does so by
                # chance.
                exceeding_sites.add(name)
            elif point.site is not ALL:
                harshest_levels[name] = point.level
        return harshest_levels

    def draw(self, axes: Axes) -> None:
        """Draw a line for each op, at most 20 that lose most, and a thick line for all ops together."""
        points_by_site: dict[Site, list[Point]] = {}
        for point in self.points:
            if point.metric is not None:
                points_by_site.setdefault(point.site, []).append(point)
        all_points = points_by_site.pop(ALL, [])
        worst_sites = sorted(
            points_by_site, key=lambda site: min(point.metric or 0.0 for point in points_by_site[site])
        )[:_MOST_LINES]
        for site in worst_sites:
            name = site.module or site.name
            axes.plot(*_coordinates(points_by_site[site]), marker="o", markersize=3, linewidth=1, label=name)
        if all_points:
            axes.plot(*_coordinates(all_points), color="black", linewidth=2.5, label="all together")
        if self.dense is not None:
            axes.axhline(self.dense, color="gray", linestyle="--", linewidth=1, label="without")
        axes.set_xlabel(self.level)
        axes.set_ylabel(self.metric)
        if points_by_site or all_points:
            axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _coordinates(points: Sequence[Point]) -> tuple[Any, Any]:
    """Return the levels and the metrics of points."""
    return [point.level for point in points], [point.metric for point in points]

"""The sweep: a tool at one op after the other, at each level, and what the user's evaluation says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Generic, Literal, TypeVar

import amanda
from amanda.action import ActionType, Routine
from amanda.errors import AmandaError
from amanda.tools.kit import Progress, attempt, check_finite, check_number
from amanda.tools.mapping import StandardMapping
from amanda.tools.sweep._result import ALL, Point, Site, SweepResult

Level = TypeVar("Level", int, float)
Prepare = Callable[[Any], None]


class SweepError(AmandaError, ValueError):
    """A sweep that cannot be made."""


class Sweep(Generic[Level]):
    """Evaluates a program with a tool at one op alone, and at all together, at each level.

    evaluate: runs the model and gives a number, such as an accuracy; it is called once for each point, and is
    to give the same each time.  make: a new tool for a level.  levels: from mild to harsh.  prepare: called
    with each tool in its scope before the evaluation, to calibrate for example.  level, metric: what the two
    are called.  progress: whether stderr tells how far it is, as a bar on a terminal and in lines elsewhere.
    compiled: as of `amanda.apply`: what becomes of callables that torch.compile made.

    First the program is evaluated without a tool, then at each level with the tool at all ops, which tells
    the ops where the tool acts, then with the tool at each of them. A tool is told of one op alone by
    `Tool.restrict`; weights are as they were, unless `evaluate` changes them.

    Raises SweepError without levels; `run` where the metric without a tool is no finite number.
    """

    def __init__(
        self,
        evaluate: Callable[[], Any],
        make: Callable[[Level], amanda.Tool],
        levels: Sequence[Level],
        prepare: Prepare | None = None,
        level: str = "level",
        metric: str = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
    ) -> None:
        if not callable(evaluate):
            raise SweepError(f"evaluate is {evaluate!r}; give a function of no arguments that gives a number")
        if not levels or len(set(levels)) < len(levels):
            raise SweepError(f"levels is {list(levels)}; give at least one, and each once")
        self._evaluate, self._prepare, self._progress = evaluate, prepare, progress
        self._compiled: Literal["eager", "instrument"] = compiled
        self._make: Callable[[Level], amanda.Tool] = make
        self._levels: tuple[Level, ...] = tuple(levels)
        self._names = (level, metric)
        self._places = amanda.Tool()
        self._sites: dict[str, Site] = {}
        self._points: dict[tuple[str, Level], Point] = {}
        self._dense: float | None = None

    @property
    def result(self) -> SweepResult:
        """The measurements so far."""
        keys = [(site.name, at) for site in (ALL, *self._sites.values()) for at in self._levels]
        points = [self._points[key] for key in keys if key in self._points]
        return SweepResult(points, self._dense, *self._names, self._is_done())

    def run(self) -> SweepResult:
        """Measure what was not measured yet.

        An exception in the evaluation of a point is kept as that point's, and logged, and so is a metric of
        NaN or infinity. One without a tool, one of Amanda, as of a tool's options, and KeyboardInterrupt
        reach the caller as they are: `result` has what was measured by then, and another `run` goes on
        from there.
        """
        with Progress(self._progress) as progress:
            if self._dense is None:
                progress.begin(1 + len(self._levels), "without a tool")
                dense = check_number(self._evaluate(), self._evaluate, SweepError)
                if not isfinite(dense):
                    raise SweepError(f"{self._names[1]} is {dense} without a tool: nothing compares with it")
                self._dense = dense
                progress.done(f"{self._names[1]} {self._dense:g}")
            for level in self._levels:
                self._measure(ALL, level, progress, 1 + len(self._levels))
            total = 1 + len(self._levels) * (1 + len(self._sites))
            for site in list(self._sites.values()):
                for level in self._levels:
                    self._measure(site, level, progress, total)
        return self.result

    def _check_levels(self) -> None:
        """Say now what is wrong with an option, and not after an evaluation."""
        for level in self._levels:
            self._make(level)

    def _is_done(self) -> bool:
        wanted = len(self._levels) * (1 + len(self._sites))
        return self._dense is not None and len(self._points) == wanted

    def _measure(self, site: Site, level: Level, progress: Progress, total: int) -> None:
        if (site.name, level) in self._points:
            return
        told = f"{site.name or 'all ops'}, {self._names[0]} {level:g}"
        progress.begin(total, told, 1 + len(self._points))
        tool = self._tool(site, level)

        def measure() -> float:
            metric = check_number(self._evaluated(tool), self._evaluate, SweepError)
            return check_finite(self._names[1], metric)

        metric, error = attempt(measure, f"no {self._names[1]} of {told}")
        self._points[site.name, level] = Point(site, level, metric, error)
        progress.done(error or f"{self._names[1]} {metric:g}")

    def _tool(self, site: Site, level: Level) -> amanda.Tool:
        """Make a tool that acts at one op alone, or at all and tells where."""
        tool = self._make(level)
        tool.depends_on(StandardMapping())
        if site is ALL:
            tool.wrap_routines(self._meet)
        else:
            tool.restrict(lambda context: self._places.place(context) == site.name)
        return tool

    def _evaluated(self, tool: amanda.Tool) -> Any:
        with amanda.apply(tool, compiled=self._compiled):
            if self._prepare is not None:
                self._prepare(tool)
            return self._evaluate()

    def _meet(self, context: amanda.OpContext, type: ActionType, routine: Routine) -> Routine:
        """Note the op at which the tool acts."""
        name = self._places.place(context)
        if name not in self._sites:
            self._sites[name] = Site(name, context["type"], context.get_scope(), context.get_source())
        return routine

"""The sweep: a tool at one op after the other, at each level, and what the user's evaluation says of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import Annotated, Any, Generic, Literal, TypeVar

import amanda
from amanda.action import ActionType, Routine
from amanda.options import Name, NonNegativeInt, NotEmpty, PositiveShare, checked
from amanda.tools.kit import Progress, check_number
from amanda.tools.mapping import StandardMapping
from amanda.tools.sweep._allocate import KEEP, Allocation
from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._prices import Cost, Left, Prices
from amanda.tools.sweep._result import ALL, Point, Site, SweepResult
from amanda.tools.trials import SearchResult, Trial

Level = TypeVar("Level", int, float)
Prepare = Callable[[Any], None]


class Sweep(Generic[Level]):
    """Evaluates a program with a tool at one op alone, and at all together, at each level.

    evaluate: runs the model and gives a number, such as an accuracy; it is called once for each point, and is
    to give the same each time.  make: a new tool for a level.  levels: from mild to harsh.  prepare: called
    with each tool in its scope before the evaluation, to calibrate for example.  level, metric: what the two
    are called.  progress: whether stderr tells how far it is, as a bar on a terminal and in lines elsewhere.
    compiled: as of `amanda.apply`: what becomes of callables that torch.compile made.  cost: what `search`
    keeps within a budget: "size" or "flops" where `left(level, weight)` gives the share of them that a level
    leaves; or a function that gives a number, such as a measured latency: it is called after each evaluation
    with the tools in force, and with none for the model as it is.

    First the program is evaluated without a tool, then at each level with the tool at all ops, which tells
    the ops where the tool acts, then with the tool at each of them. A tool is told of one op alone by
    `Tool.restrict`; weights are as they were, unless `evaluate` changes them.

    Raises SweepError without levels, and for two that are equal in six digits; `run` where the metric without
    a tool is no finite number.
    """

    @checked(error=SweepError)
    def __init__(
        self,
        evaluate: Callable[[], Any],
        make: Callable[[Level], amanda.Tool],
        levels: Sequence[Level],
        prepare: Prepare | None = None,
        level: Name = "level",
        metric: Name = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
        cost: Cost = None,
        left: Left | None = None,
    ) -> None:
        if isinstance(cost, str) and left is None:
            raise SweepError(f"Sweep: cost is {cost!r} without left; give left too, a function, or None")
        numeric = all(isinstance(one, Real) and isfinite(one) for one in levels)
        if not levels or not numeric or len({f"{one:g}" for one in levels}) < len(levels):
            raise SweepError(
                f"levels is {list(levels)}; give one number at least, all different in six digits"
            )
        self._evaluate, self._prepare, self._progress = evaluate, prepare, progress
        self._compiled: Literal["eager", "instrument"] = compiled
        self._report = amanda.Report()
        self._make: Callable[[Level], amanda.Tool] = make
        self._levels: tuple[Level, ...] = tuple(levels)
        self._names = (level, metric)
        self._places = amanda.Tool()
        self._sites: dict[str, Site] = {}
        self._points: dict[tuple[str, Level], Point] = {}
        self._dense: float | None = None
        self._prices = Prices(cost, left)
        self._trials: dict[tuple[str, ...], Trial] = {}

    @property
    def result(self) -> SweepResult:
        """The measurements so far."""
        keys = [(site.name, at) for site in (ALL, *self._sites.values()) for at in self._levels]
        points = [self._points[key] for key in keys if key in self._points]
        return SweepResult(points, self._dense, *self._names, self._is_done())

    @checked(error=SweepError)
    def run(self, retries: NonNegativeInt = 0) -> SweepResult:
        """Measure what was not measured yet.

        retries: how often a point is evaluated again that failed, now or in a run before.

        An exception in the evaluation of a point is kept as that point's, and logged, and so is a metric of
        NaN or infinity. One without a tool, one of Amanda, as of a tool's options, and KeyboardInterrupt
        reach the caller as they are: `result` has what was measured by then, and another `run` goes on
        from there.
        """
        with Progress(self._progress) as progress:
            if self._dense is None:
                progress.begin(1 + len(self._levels), "without a tool")
                noted = [self._prices.noted] if self._prices.cost is not None else []
                with self._scope(*noted):
                    dense = check_number(self._evaluate(), self._evaluate, SweepError)
                    self._prices.measured = self._measured_cost()
                if not isfinite(dense):
                    raise SweepError(f"{self._names[1]} is {dense} without a tool: nothing compares with it")
                self._dense = dense
                progress.done(f"{self._names[1]} {self._dense:g}")
            for level in self._levels:
                self._measure(ALL, level, progress, 1 + len(self._levels), retries)
            total = 1 + len(self._levels) * (1 + len(self._sites))
            for site in list(self._sites.values()):
                for level in self._levels:
                    self._measure(site, level, progress, total, retries)
        return self.result

    @checked(error=SweepError)
    def search(
        self, budgets: Annotated[Sequence[PositiveShare], NotEmpty], retries: NonNegativeInt = 0
    ) -> SearchResult:
        """Choose a level for each op such that the cost is within a budget, and evaluate the choice.

        budgets: shares of the cost without the tool, such as 0.25.  Each op gets one of the levels, or is
        left ("keep"), such that the sum of the drops, each measured at one op alone, is the least; a drop
        below 0 counts as 0.  Ops that read a weight in common get one level.

        The result has a trial for the model without the tool, for each budget, and for all ops at each level,
        with those of the Pareto front marked; `tools` gives the tools of one.  What is not measured yet is
        measured first, as by `run`.  retries: as of `run`, also for the evaluations of the choices.

        Raises SweepError without a cost, and for a budget that the levels do not reach.
        """
        name = self._prices.name
        if self._prices.cost is None:
            raise SweepError("search: the sweep has no cost; give it one, such as cost='size'")
        self.run(retries)
        assert self._dense is not None
        allocation = Allocation(self._sites, self._levels, self._points, self._dense, self._prices)
        chosen = [allocation.choose(one) for one in budgets]
        trials = [Trial(dict.fromkeys(self._sites, KEEP), self._dense, {name: self._prices.total}, 0.0)]
        with Progress(self._progress) as progress:
            for number, (budget, architecture) in enumerate(zip(budgets, chosen, strict=True)):
                progress.begin(len(budgets), f"{budget:g} of the {name}", number)
                trials.append(self._trial(architecture, allocation.cost(architecture), retries))
                self._done(progress, trials[-1])
        for level in self._levels:
            same, one = dict.fromkeys(self._sites, f"{level:g}"), self._points[ALL.name, level]
            cost = allocation.cost(same) if one.cost is None else one.cost
            trials.append(Trial(same, one.metric, {name: cost}, one.seconds, one.error))
        return SearchResult(trials, self._names[1], [name], "")

    def tools(self, architecture: Mapping[str, str]) -> list[amanda.Tool]:
        """Return new tools, one for each level, that act at the ops which an architecture gives it.

        with amanda.apply(*sweep.tools(result.best.architecture)): ...
        """
        found = []
        for level in self._levels:
            names = {name for name, label in architecture.items() if label == f"{level:g}"}
            found += [self._tool(names, level)] if names else []
        return found

    def _scope(self, *tools: amanda.Tool) -> amanda.Scope:
        """Return a scope with the report of the whole sweep, which logs each warning once."""
        scope = amanda.apply(*tools, compiled=self._compiled)
        scope.report = self._report
        return scope

    def _trial(self, architecture: Mapping[str, str], cost: float, retries: int) -> Trial:
        """Evaluate an architecture, unless it was."""
        labels = tuple(architecture.values())
        for _ in _attempts(self._trials.get(labels), retries):
            metric, error, seconds, measured = self._evaluated(" ".join(labels), *self.tools(architecture))
            costs = {self._prices.name: cost if measured is None else measured}
            self._trials[labels] = Trial(architecture, metric, costs, seconds, error)
            if not error:
                break
        return self._trials[labels]

    def _check_levels(self) -> None:
        """Say now what is wrong with an option, and not after an evaluation."""
        for level in self._levels:
            self._make(level)

    def _is_done(self) -> bool:
        wanted = len(self._levels) * (1 + len(self._sites))
        return self._dense is not None and len(self._points) == wanted

    def _measure(self, site: Site, level: Level, progress: Progress, total: int, retries: int) -> None:
        told, key = f"{site.name or 'all ops'}, {self._names[0]} {level:g}", (site.name, level)
        for _ in _attempts(self._points.get(key), retries):
            progress.begin(total, told, 1 + len(self._points) - (key in self._points))
            tool = self._tool(None if site is ALL else {site.name}, level)
            self._points[key] = Point(site, level, *self._evaluated(told, tool))
            self._done(progress, self._points[key])
            if not self._points[key].error:
                break

    def _done(self, progress: Progress, one: Point | Trial) -> None:
        progress.done(one.error or f"{self._names[1]} {one.metric:g}")

    def _evaluated(self, told: str, *tools: amanda.Tool) -> tuple[float | None, str, float, float | None]:
        """Evaluate with tools; return the metric, what was raised, the seconds, and a measured cost."""
        begun = perf_counter()

        def measure() -> tuple[float, float | None]:
            with self._scope(*tools):
                for tool in tools:
                    if self._prepare is not None:
                        self._prepare(tool)
                metric = check_number(self._evaluate(), self._evaluate, SweepError, self._names[1])
                return metric, self._measured_cost(*tools)

        found, error = Progress.attempt(measure, f"no {self._names[1]} of {told}")
        metric, cost = found or (None, None)
        return metric, error, perf_counter() - begun, cost

    def _measured_cost(self, *tools: amanda.Tool) -> float | None:
        cost = self._prices.cost
        if not callable(cost):
            return None
        return check_number(cost(*tools), cost, SweepError, self._prices.name)

    def _tool(self, names: Collection[str] | None, level: Level) -> amanda.Tool:
        """Make a tool that acts at some ops alone; None: at all, and tells where."""
        tool = self._make(level)
        tool.depends_on(StandardMapping())
        if names is None:
            tool.wrap_routines(self._meet)
        else:
            tool.restrict(lambda context: self._places.place(context) in names)
        return tool

    def _meet(self, context: amanda.OpContext, type: ActionType, routine: Routine) -> Routine:
        """Note the op at which the tool acts."""
        name = self._places.place(context)
        if name not in self._sites:
            self._sites[name] = Site(name, context["type"], context.get_scope(), context.get_source())
        self._sites[name].op_ids.add(context.get_op_id())
        return routine


def _attempts(earlier: Point | Trial | None, retries: int) -> range:
    """Return as many numbers as there may be evaluations."""
    return range(1 + retries if earlier is None else retries if earlier.error else 0)

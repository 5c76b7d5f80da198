"""Sweeps: evaluate a program with a tool at one op after the other, at each level."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import amanda
from amanda.action import ActionType, Routine
from amanda.options import Name, NonNegativeInt, NotEmpty, PositiveShare, Range, Share, checked
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.sweep._allocation import KEEP, Allocation, CostOption, RemainingShare, SweepCost
from amanda.tools.sweep._result import ALL, Point, Site, SweepError, SweepResult
from amanda.tools.trials import Progress, SearchResult, Trial, check_number

Level = TypeVar("Level", int, float)
Prepare = Callable[[Any], None]


class _Measurement(NamedTuple):
    """One evaluation.  metric: None after an error.  cost: None without a function that measures it."""

    metric: float | None
    error: str
    seconds: float
    cost: float | None


class Sweep(Generic[Level]):
    """Evaluate a program with a tool at one op alone, and at all ops together, at each level.

    The program is evaluated first without a tool; then at each level with the tool at all ops, which shows
    where the tool acts; then with the tool at each of these ops alone (`Tool.restrict`). The tools leave
    weights unchanged, unless `evaluate` changes them.

    Args:
        evaluate: Function that runs the model and returns a number, such as an accuracy; each point calls it
            once, and it must return the same number each time.
        make: Function that returns a new tool for a level.
        levels: From mild to harsh.
        prepare: Function that is called with each tool in its scope before the evaluation, such as a
            calibration.
        level: Names of the two in results.
        metric: See `level`.
        progress: True for a progress bar on stderr, lines in a file.
        compiled: What happens to callables that torch.compile made, as in `amanda.apply`.
        cost: The cost that `search` keeps within a budget. "size" or "flops" need `left(level, weight)`,
            which returns the share of the cost that remains at a level. A function returns a number, such as
            a latency; it is called with the tools in force after each evaluation, and without tools for the
            unchanged model.

    Raises:
        SweepError: Without levels, and for two that are equal in six digits; `run` where the metric without a
            tool is not a finite number.
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
        cost: CostOption = None,
        left: RemainingShare | None = None,
    ) -> None:
        if isinstance(cost, str) and left is None:
            raise SweepError(f"Sweep: cost is {cost!r} without left; give left too, a function, or None")
        numeric = all(isinstance(level_value, Real) and isfinite(level_value) for level_value in levels)
        if not levels or not numeric or len({f"{level_value:g}" for level_value in levels}) < len(levels):
            raise SweepError(
                f"levels is {list(levels)}; give one number at least, all different in six digits"
            )
        self._evaluate, self._prepare, self._progress = evaluate, prepare, progress
        self._compiled: Literal["eager", "instrument"] = compiled
        self._report = amanda.Report()
        self._make: Callable[[Level], amanda.Tool] = make
        self._levels: tuple[Level, ...] = tuple(levels)
        self._names = (level, metric)
        # Names of places are the same for each new tool of a level, so that points are found again.
        self._place_namer = amanda.Tool()
        self._sites: dict[str, Site] = {}
        self._points: dict[tuple[str, Level], Point] = {}
        self._dense: float | None = None
        self._cost_model = SweepCost(cost, left)
        self._trials: dict[tuple[str, ...], Trial] = {}

    @property
    def result(self) -> SweepResult:
        """The measurements so far."""
        keys = [(site.name, level) for site in (ALL, *self._sites.values()) for level in self._levels]
        points = [self._points[key] for key in keys if key in self._points]
        return SweepResult(points, self._dense, *self._names, self._is_complete())

    @checked(error=SweepError)
    def run(self, retries: NonNegativeInt = 0) -> SweepResult:
        """Measure all points that are not measured yet, and return the result.

        An exception, NaN or infinity in the evaluation of a point is logged and recorded as `Point.error`.
        Exceptions of the evaluation without a tool, Amanda's errors, such as for options of a tool, and
        KeyboardInterrupt reach the caller: `result` has the points measured before, and another `run`
        measures the rest.

        Args:
            retries: Number of further evaluations of a point that failed, now or in an earlier run.
        """
        with Progress(self._progress) as progress:
            if self._dense is None:
                progress.begin(1 + len(self._levels), "without a tool")
                recorders = [self._cost_model.op_costs] if self._cost_model.cost is not None else []
                with self._scope(*recorders):
                    dense = check_number(self._evaluate(), self._evaluate, SweepError)
                    self._cost_model.measured = self._measured_cost()
                # All drops would be NaN.
                if not isfinite(dense):
                    raise SweepError(f"{self._names[1]} is {dense} without a tool: nothing compares with it")
                self._dense = dense
                progress.done(f"{self._names[1]} {self._dense:g}")
            # All ops together come first: this evaluation records the sites.
            for level in self._levels:
                self._measure_point(ALL, level, progress, 1 + len(self._levels), retries)
            total = 1 + len(self._levels) * (1 + len(self._sites))
            for site in list(self._sites.values()):
                for level in self._levels:
                    self._measure_point(site, level, progress, total, retries)
        return self.result

    @checked(error=SweepError)
    def search(
        self, budgets: Annotated[Sequence[PositiveShare], NotEmpty], retries: NonNegativeInt = 0
    ) -> SearchResult:
        """Choose a level for each op within a cost budget, and evaluate the choice.

        Each op gets a level, or "keep" for no change. The choice has the least sum of drops, each measured at
        one op alone; a drop below 0 counts as 0. Ops that read a weight in common get the same level.

        The result has a trial for the model without the tool, for each budget, and for all ops at each level;
        trials of the Pareto front are marked. `tools(trial.architecture)` returns the tools of a trial.
        `run` measures missing points first.

        Args:
            budgets: Shares of the cost without the tool, such as 0.25.
            retries: As in `run`.

        Raises:
            SweepError: Without a cost, and for a budget below the cost of the harshest levels.
        """
        name = self._cost_model.name
        if self._cost_model.cost is None:
            raise SweepError("search: the sweep has no cost; give it one, such as cost='size'")
        self.run(retries)
        assert self._dense is not None
        allocation = Allocation(self._sites, self._levels, self._points, self._dense, self._cost_model)
        architectures = [allocation.choose(budget) for budget in budgets]
        trials = [Trial(dict.fromkeys(self._sites, KEEP), self._dense, {name: self._cost_model.total}, 0.0)]
        with Progress(self._progress) as progress:
            for number, (budget, architecture) in enumerate(zip(budgets, architectures, strict=True)):
                progress.begin(len(budgets), f"{budget:g} of the {name}", number)
                trials.append(
                    self._evaluate_architecture(architecture, allocation.cost(architecture), retries)
                )
                self._report_progress(progress, trials[-1])
        for level in self._levels:
            uniform, point = dict.fromkeys(self._sites, f"{level:g}"), self._points[ALL.name, level]
            cost = allocation.cost(uniform) if point.cost is None else point.cost
            trials.append(Trial(uniform, point.metric, {name: cost}, point.seconds, point.error))
        return SearchResult(trials, self._names[1], [name], "")

    def tools(self, architecture: Mapping[str, str]) -> list[amanda.Tool]:
        """Return new tools for an architecture: for each level a tool that acts at the ops with this level.

        with amanda.apply(*sweep.tools(result.best.architecture)): ...
        """
        tools = []
        for level in self._levels:
            names = {name for name, label in architecture.items() if label == f"{level:g}"}
            tools += [self._make_tool(names, level)] if names else []
        return tools

    def _scope(self, *tools: amanda.Tool) -> amanda.Scope:
        """Return a scope that shares the report of the sweep, so that each warning is logged once."""
        scope = amanda.apply(*tools, compiled=self._compiled)
        # A warning about an op would come once for each point otherwise.
        scope.report = self._report
        return scope

    def _evaluate_architecture(self, architecture: Mapping[str, str], cost: float, retries: int) -> Trial:
        """Return the trial of an architecture, evaluated unless an earlier one succeeded."""
        # Several budgets may choose the same levels, which are evaluated once.
        labels = tuple(architecture.values())
        for _ in _remaining_attempts(self._trials.get(labels), retries):
            measured = self._measure_with(" ".join(labels), *self.tools(architecture))
            costs = {self._cost_model.name: cost if measured.cost is None else measured.cost}
            trial = Trial(architecture, measured.metric, costs, measured.seconds, measured.error)
            self._trials[labels] = trial
            if not trial.error:
                break
        return self._trials[labels]

    def _check_levels(self) -> None:
        """Make a tool for each level, so that a wrong option raises before the first evaluation."""
        for level in self._levels:
            # A tool is cheap, and an evaluation may take hours.
            self._make(level)

    def _is_complete(self) -> bool:
        """Return True if all sites are evaluated at all levels."""
        point_count = len(self._levels) * (1 + len(self._sites))
        return self._dense is not None and len(self._points) == point_count

    def _measure_point(self, site: Site, level: Level, progress: Progress, total: int, retries: int) -> None:
        """Evaluate a site at a level, unless an earlier evaluation succeeded; record the point."""
        description, key = f"{site.name or 'all ops'}, {self._names[0]} {level:g}", (site.name, level)
        for _ in _remaining_attempts(self._points.get(key), retries):
            # One evaluation was without a tool; a point that is tried again is not done.
            done_count = 1 + len(self._points) - (key in self._points)
            progress.begin(total, description, done_count)
            tool = self._make_tool(None if site is ALL else {site.name}, level)
            self._points[key] = Point(site, level, *self._measure_with(description, tool))
            self._report_progress(progress, self._points[key])
            if not self._points[key].error:
                break

    def _report_progress(self, progress: Progress, measurement: Point | Trial) -> None:
        progress.done(measurement.error or f"{self._names[1]} {measurement.metric:g}")

    def _measure_with(self, description: str, *tools: amanda.Tool) -> _Measurement:
        """Evaluate with tools, each prepared; an exception becomes the error of the measurement."""
        # With the scope and the preparation, as a user of the tool pays for both.
        start = perf_counter()

        def evaluate_with_tools() -> tuple[float, float | None]:
            """Return the metric and a measured cost, from a scope with all tools prepared."""
            with self._scope(*tools):
                for tool in tools:
                    if self._prepare is not None:
                        self._prepare(tool)
                metric = check_number(self._evaluate(), self._evaluate, SweepError, self._names[1])
                return metric, self._measured_cost(*tools)

        measurements, error = Progress.attempt(evaluate_with_tools, f"no {self._names[1]} of {description}")
        metric, cost = measurements or (None, None)
        return _Measurement(metric, error, perf_counter() - start, cost)

    def _measured_cost(self, *tools: amanda.Tool) -> float | None:
        """Return what the cost function returns for tools; None unless the cost is a function."""
        cost = self._cost_model.cost
        if not callable(cost):
            return None
        return check_number(cost(*tools), cost, SweepError, self._cost_model.name)

    def _make_tool(self, names: Collection[str] | None, level: Level) -> amanda.Tool:
        """Make a tool that acts at the named ops alone; None: at all ops, which it records as sites."""
        tool = self._make(level)
        # For the types of ops in sites.
        tool.depends_on(StandardMapping())
        if names is None:
            # Only the tool knows where it acts: ops at which it inserts no routine are not sites.
            tool.wrap_routines(self._record_site)
        else:
            tool.restrict(lambda context: self._place_namer.place(context) in names)
        return tool

    def _record_site(self, context: amanda.OpContext, type: ActionType, routine: Routine) -> Routine:
        """Record the op at which the tool acts as a site; return the routine unchanged."""
        name = self._place_namer.place(context)
        if name not in self._sites:
            self._sites[name] = Site(name, context["type"], context.get_scope(), context.get_source())
        self._sites[name].op_ids.add(context.get_op_id())
        return routine


def _remaining_attempts(earlier: Point | Trial | None, retries: int) -> range:
    """Return a range with one number for each evaluation that is still allowed; none after a success."""
    if earlier is None:
        return range(1 + retries)
    return range(retries if earlier.error else 0)


Number = TypeVar("Number", int, float)


class SparsitySweep(Sweep[float]):
    """Measure a metric against sparsity: prune the weight of one op at a time, and all together.

    With scope="global" a first evaluation of each point ranks the weights together. An importance by inputs
    reads the inputs of that evaluation; one by gradients needs an evaluation with a backward pass.

    Raises PruneTool's errors for invalid options and levels.

    Args:
        evaluate: See `Sweep`.
        metric: See `evaluate`.
        progress: See `evaluate`.
        compiled: See `evaluate`.
        sparsities: Shares of each weight that become zero.
        options: Of `PruneTool`, such as pattern and type.
        cost: "size" (bytes of weights that are not zero, without indices), "flops" or a function: see
            `Sweep`.

    >>> sweep = SparsitySweep(lambda: 1.0, sparsities=[0.5, 0.9], pattern="structured", progress=False)
    """

    @checked(error=SweepError)
    def __init__(
        self,
        evaluate: Callable[[], Any],
        sparsities: Annotated[Iterable[Share], NotEmpty] = (0.3, 0.5, 0.7, 0.8, 0.9),
        metric: Name = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
        cost: CostOption = "size",
        **options: Any,
    ) -> None:
        def make(sparsity: float) -> PruneTool:
            return PruneTool(sparsity=sparsity, **options)

        def prepare(tool: PruneTool) -> None:
            if tool.needs_preparation:
                with tool.calibrating():
                    evaluate()

        levels = _sorted_levels("sparsities", sparsities)
        super().__init__(
            evaluate, make, levels, prepare, "sparsity", metric, progress, compiled, cost,
            lambda level, weight: 1 - level,
        )  # fmt: skip
        self._check_levels()


class BitsSweep(Sweep[int]):
    """Measure a metric against bits: quantise the inputs of one op at a time, and all together.

    Raises QuantizeTool's errors for invalid options and levels.

    Args:
        evaluate: See `Sweep`.
        metric: See `evaluate`.
        progress: See `evaluate`.
        compiled: See `evaluate`.
        bits: Of each quantised number.
        weights: True to quantise them.
        activations: See `weights`.
        calibrate: Function that runs the model on examples to choose scales of activations; None to choose
            them at each execution.
        cost: "size" (bytes of weights at their bits, without scales) or a function: see `Sweep`.
        options: Of `QuantizeTool`, such as type, observer, per_channel.

    >>> sweep = BitsSweep(lambda: 1.0, bits=[8, 4], activations=False, progress=False)
    """

    @checked(error=SweepError)
    def __init__(
        self,
        evaluate: Callable[[], Any],
        bits: Annotated[Iterable[Annotated[int, Range(2, 16)]], NotEmpty] = (8, 6, 5, 4, 3, 2),
        weights: bool = True,
        activations: bool = True,
        calibrate: Callable[[], Any] | None = None,
        metric: Name = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
        cost: CostOption = "size",
        **options: Any,
    ) -> None:
        def make(level: int) -> QuantizeTool:
            return QuantizeTool(
                method="dynamic" if calibrate is None else "static", weight_bits=level if weights else None,
                activation_bits=level if activations else None, **options,
            )  # fmt: skip

        def prepare(tool: QuantizeTool) -> None:
            if calibrate is not None:
                with tool.calibrating():
                    calibrate()

        levels = _sorted_levels("bits", bits)[::-1]
        if cost == "flops":
            raise SweepError("cost is 'flops', of which fewer bits save none; give 'size' or a function")
        super().__init__(
            evaluate, make, levels, prepare, "bits", metric, progress, compiled, cost,
            lambda level, weight: level * weight.numbers / 8 / weight.size if weights else 1.0,
        )  # fmt: skip
        self._check_levels()


def _sorted_levels(name: str, levels: Iterable[Number]) -> list[Number]:
    """Return levels in rising order.  Raises SweepError for levels that are not numbers."""
    try:
        return sorted(levels)
    except TypeError as error:
        raise SweepError(f"{name} is {levels!r}; give a list of numbers") from error

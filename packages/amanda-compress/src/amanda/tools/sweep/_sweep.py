"""Sweeps: evaluate a program with a tool at one op after the other, at each level."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import Annotated, Any, Generic, Literal, TypeVar

import amanda
from amanda.options import Name, NonNegativeInt, NotEmpty, OutputFile, PositiveShare, Range, Share, checked
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.sweep._allocation import KEEP, Allocation, CostOption, RemainingShare, SweepCost
from amanda.tools.sweep._evaluations import (
    Level,
    Prepare,
    Record,
    SweepProgram,
    SweepRecords,
    option_words,
    record_key,
)
from amanda.tools.sweep._result import ALL, Point, SweepError, SweepResult
from amanda.tools.trials import Progress, SearchResult, Trial, run_trials

logger = logging.getLogger("amanda")


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
        left: Function of a level and a weight, for cost "size" and "flops"; see `cost`.

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
        are_numbers = all(isinstance(level_value, Real) and isfinite(level_value) for level_value in levels)
        if not levels or not are_numbers or len({f"{level_value:g}" for level_value in levels}) < len(levels):
            raise SweepError(
                f"levels is {list(levels)}; give one number at least, all different in six digits"
            )
        self._progress, self._level_name, self._metric_name = progress, level, metric
        self._cost_model = SweepCost(cost, left)
        measure_cost = cost if callable(cost) else None
        self._program: SweepProgram[Level] = SweepProgram(
            evaluate, make, levels, prepare, measure_cost, (metric, self._cost_model.name), compiled
        )
        self._records = SweepRecords()
        self._tool_options: Mapping[str, Any] = {}
        """Those of the tools that a file of `resume` belongs to; a `make` of the user tells none."""

    @property
    def result(self) -> SweepResult:
        """The measurements so far."""
        points = self._points
        complete = self._program.dense is not None and len(points) == self._count - 1
        return SweepResult(
            list(points.values()), self._program.dense, self._level_name, self._metric_name, complete
        )

    @checked(error=SweepError)
    def run(
        self, retries: NonNegativeInt = 0, jobs: int | None = None, resume: OutputFile | None = None
    ) -> SweepResult:
        """Measure all points that are not measured yet, and return the result.

        An exception, NaN or infinity in the evaluation of a point is logged and recorded as `Point.error`,
        and so is the end of its process. Exceptions of the evaluation without a tool, Amanda's errors, such
        as for options of a tool, and KeyboardInterrupt reach the caller: `result` has the points measured
        before, and another `run` measures the rest.

        Args:
            retries: Number of further evaluations of a point that failed, now or in an earlier run.
            jobs: Number of processes that evaluate single ops; -1 for one a core; None for 1, or for those of
                the engine of `joblib.parallel_config`. They get copies of the functions of the sweep and
                of the model, and give the same numbers.
            resume: A file that keeps each point: a further run with it, also in another process, measures
                the points that it lacks. Evaluations without a tool and with all ops find the ops, and run
                again.
        """
        with self._open_records(jobs, resume), Progress(self._progress) as progress:
            if self._program.dense is None:
                self._measure_dense(progress)
            # All ops together come first: this evaluation records the sites.
            for label in self._program.levels:
                self._measure_all_ops(label, progress, retries)
            points = [{name: label} for name in self._program.sites for label in self._program.levels]
            self._measure(points, progress, retries, jobs, self._count)
        return self.result

    @checked(error=SweepError)
    def search(
        self,
        budgets: Annotated[Sequence[PositiveShare], NotEmpty],
        retries: NonNegativeInt = 0,
        jobs: int | None = None,
        resume: OutputFile | None = None,
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
            jobs: As in `run`.
            resume: As in `run`; the file keeps the choices too.

        Raises:
            SweepError: Without a cost, and for a budget below the cost of the harshest levels.
        """
        cost_name, program = self._cost_model.name, self._program
        if self._cost_model.cost is None:
            raise SweepError("search: the sweep has no cost; give it one, such as cost='size'")
        self.run(retries, jobs, resume)
        assert program.dense is not None
        points = self._points
        allocation = Allocation(
            program.sites, list(program.levels.values()), points, program.dense, self._cost_model
        )
        # One for each budget: a level for each op.
        architectures = [allocation.choose(budget) for budget in budgets]
        with self._open_records(jobs, resume), Progress(self._progress) as progress:
            # Several budgets may choose the same levels, which are evaluated once.
            choices = {record_key(architecture): architecture for architecture in architectures}
            self._measure(list(choices.values()), progress, retries, jobs, len(choices))
        unchanged_architecture = dict.fromkeys(program.sites, KEEP)
        trials = [Trial(unchanged_architecture, program.dense, {cost_name: self._cost_model.total}, 0.0)]
        for architecture in architectures:
            record = self._records.get(architecture)
            assert record is not None
            cost = allocation.cost(architecture) if record.cost is None else record.cost
            costs = {cost_name: cost}
            trials.append(Trial(architecture, record.metric, costs, record.seconds, record.error))
        for label, level in program.levels.items():
            uniform_architecture, point = dict.fromkeys(program.sites, label), points[ALL.name, level]
            cost = allocation.cost(uniform_architecture) if point.cost is None else point.cost
            trials.append(
                Trial(uniform_architecture, point.metric, {cost_name: cost}, point.seconds, point.error)
            )
        return SearchResult(trials, self._metric_name, [cost_name], stopped="")

    def tools(self, architecture: Mapping[str, str]) -> list[amanda.Tool]:
        """Return new tools for an architecture: for each level a tool that acts at the ops with this level.

        Args:
            architecture: Level of each op, as a trial of `search` has it.

        with amanda.apply(*sweep.tools(result.best.architecture)): ...
        """
        return self._program.tools(architecture)

    @property
    def _points(self) -> dict[tuple[str, Level], Point]:
        """The points that were evaluated, by the name of the op and the level."""
        points: dict[tuple[str, Level], Point] = {}
        for site in (ALL, *self._program.sites.values()):
            for label, level in self._program.levels.items():
                record = self._records.get({site.name: label})
                if record is not None:
                    points[site.name, level] = Point(site, level, *record)
        return points

    @property
    def _count(self) -> int:
        """Number of evaluations of the sweep, with that without a tool."""
        return 1 + len(self._program.levels) * (1 + len(self._program.sites))

    def _open_records(
        self, jobs: int | None, resume: str | os.PathLike[str] | None
    ) -> AbstractContextManager[None]:
        """Return the context of a run that keeps its records in a file; raise AmandaError for wrong jobs."""
        # Without trials it only checks the jobs, ahead of evaluations that may take hours.
        run_trials(self._program.load, [], jobs)
        options = {
            "sweep": type(self).__name__, "level": self._level_name, "metric": self._metric_name,
            "cost": self._cost_model.name, **option_words(self._tool_options),
        }  # fmt: skip
        return self._records.write_to(resume, options)

    def _check_levels(self) -> None:
        """Make a tool for each level, so that a wrong option raises before the first evaluation."""
        for level in self._program.levels.values():
            # A tool is cheap, and an evaluation may take hours.
            self._program.make(level)

    def _measure_dense(self, progress: Progress) -> None:
        """Evaluate without a tool; record the metric, its cost, and the costs of ops."""
        progress.begin(self._count, "without a tool")
        begin = perf_counter()
        recorders = [self._cost_model.op_costs] if self._cost_model.cost is not None else []
        metric, cost = self._program.measure_dense(*recorders)
        self._records.add({}, Record(metric, "", perf_counter() - begin, cost))
        self._program.dense, self._cost_model.measured = metric, cost
        progress.done(f"{self._metric_name} {metric:g}")

    def _measure_all_ops(self, label: str, progress: Progress, retries: int) -> None:
        """Evaluate all ops at a level, unless an earlier evaluation succeeded."""
        architecture = {ALL.name: label}
        for attempt in range(1 + retries):
            if self._records.is_due(architecture, attempt):
                description, begin = self._describe(architecture), perf_counter()
                progress.begin(self._count, description, 1 + len(self._points))
                measurement, error = Progress.attempt(
                    partial(self._program.measure_all_ops, self._program.levels[label]),
                    f"no {self._metric_name} of {description}",
                )
                metric, cost = measurement or (None, None)  # without a metric the attempt failed
                self._records.add(architecture, Record(metric, error, perf_counter() - begin, cost))
                progress.done(error or f"{self._metric_name} {metric:g}")

    def _measure(
        self,
        architectures: Sequence[Mapping[str, str]],
        progress: Progress,
        retries: int,
        jobs: int | None,
        total: int,
    ) -> None:
        """Evaluate and record architectures, here or in workers, unless earlier evaluations succeeded.

        total: number of evaluations that the progress counts, of which these come last.
        """
        for attempt in range(1 + retries):
            due_architectures = [
                architecture for architecture in architectures
                if self._records.is_due(architecture, attempt)
            ]  # fmt: skip
            pending = {record_key(architecture): architecture for architecture in due_architectures}
            if due_architectures:
                progress.begin(total, self._describe(due_architectures[0]), total - len(due_architectures))
            for outcome in run_trials(self._program.load, due_architectures, jobs):
                description = self._describe(outcome.trial)
                if outcome.error:
                    logger.warning("no %s of %s: %s", self._metric_name, description, outcome.error)
                metric, cost = outcome.value or (None, None)
                record = Record(metric, outcome.error, outcome.seconds, cost)
                self._records.add(outcome.trial, record)
                progress.begin(total, description, total - len(pending))
                progress.done(outcome.error or f"{self._metric_name} {metric:g}")
                del pending[record_key(outcome.trial)]
                if pending:
                    # In this process the next; of several the one that began first.
                    progress.begin(total, self._describe(next(iter(pending.values()))), total - len(pending))

    def _describe(self, architecture: Mapping[str, str]) -> str:
        """Return the words for an architecture in progress and messages."""
        if len(architecture) > 1:
            return " ".join(architecture.values())
        ((name, label),) = architecture.items()
        return f"{name or 'all ops'}, {self._level_name} {label}"


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
            """Evaluate once as a calibration, if the tool needs one."""
            if tool.needs_preparation:
                with tool.calibrating():
                    evaluate()

        levels = _sorted_levels("sparsities", sparsities)
        super().__init__(
            evaluate, make, levels, prepare, "sparsity", metric, progress, compiled, cost,
            lambda level, weight: 1 - level,
        )  # fmt: skip
        self._tool_options = options
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

    Raises:
        SweepError: For cost "flops", of which fewer bits save none.

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
            """Return a new tool for a number of bits, which calibrates if there is `calibrate`."""
            return QuantizeTool(
                method="dynamic" if calibrate is None else "static", weight_bits=level if weights else None,
                activation_bits=level if activations else None, **options,
            )  # fmt: skip

        def prepare(tool: QuantizeTool) -> None:
            """Calibrate the tool by `calibrate`, if there is one."""
            if calibrate is not None:
                with tool.calibrating():
                    calibrate()

        levels = _sorted_levels("bits", bits)[::-1]
        if cost == "flops":
            raise SweepError("cost is 'flops', of which fewer bits save none; give 'size' or a function")

        def remaining_share(level: int, weight: Any) -> float:
            """Return the share of a weight's bytes that its integers have."""
            return level * weight.numbers / 8 / weight.size if weights else 1.0

        super().__init__(
            evaluate, make, levels, prepare, level="bits", metric=metric, progress=progress,
            compiled=compiled, cost=cost, left=remaining_share,
        )  # fmt: skip
        self._tool_options = {
            "weights": weights, "activations": activations, "calibrate": calibrate, **options,
        }  # fmt: skip
        self._check_levels()


def _sorted_levels(name: str, levels: Iterable[Number]) -> list[Number]:
    """Return levels in rising order.  Raises SweepError for levels that are not numbers."""
    try:
        return sorted(levels)
    except TypeError as error:
        raise SweepError(f"{name} is {levels!r}; give a list of numbers") from error

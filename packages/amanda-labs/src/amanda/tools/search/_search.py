"""The search: a controller proposes architectures, the user's functions evaluate them, here or in workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import isfinite, nan, prod
from time import perf_counter
from typing import Any, Literal, NamedTuple

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.options import Name, NonNegativeFloat, NonNegativeInt, PositiveInt, Seed, checked, shown
from amanda.tools.libraries import numpy as np
from amanda.tools.search._candidates import SearchError
from amanda.tools.search._controllers import (
    Controller,
    Evolution,
    OptunaController,
    PolicyGradient,
    Random,
    StudyTrials,
)
from amanda.tools.search._tool import SearchTool
from amanda.tools.trials import Outcome, Progress, SearchResult, Trial, check_number, run_trials

logger = logging.getLogger("amanda")

_CONTROLLERS: Mapping[str, Callable[[], Controller]] = {
    "random": Random, "evolution": Evolution, "policy": PolicyGradient, "optuna": OptunaController,
}  # fmt: skip
_MAX_DRAWS = 1000
_COPIED_MODEL = (
    "A worker has a copy of the model with which the tool was prepared; evaluate has to run that copy, and "
    "other models under amanda.disabled(). An imported module makes a model of its own there: call "
    "cloudpickle.register_pickle_by_value(module) first"
)


class Search:
    """Evaluates architectures of a tool, and records the metric and the costs of each.

    No architecture is evaluated twice, unless `train` is given.

    Args:
        tool: After `prepare`, so that its ops are known.
        evaluate: A function without arguments that returns a number, the higher the better, for the tool's
            current architecture; parameters that it trains stay trained for later architectures.
        controller: "random", "evolution", "policy", "optuna", or a `Controller`.
        train: Called ahead of each evaluation with the current architecture, to train shared parameters.
        costs: "flops", "size", or functions without arguments, such as a measurement of latency; they are
            called with the current architecture, and the lower the better.
        limits: For "flops" or "size"; architectures above a limit are not evaluated.
        study: A study of Optuna that keeps the trials, and that `run` continues; or a storage of Optuna or
            its URL, in which a study is created.  Searches in several processes may share one study, and each
            has the trials of all.
        metric: Name of the number.
        seed: Of the controller.
        batch: Number of architectures that are proposed at once, before the controller learns from any of
            them; with `jobs` they are evaluated at the same time.
        progress: Write progress to stderr.
        compiled: See `amanda.apply`.

    Raises:
        SearchError: For invalid options.
    """

    @checked(error=SearchError)
    def __init__(
        self,
        tool: SearchTool,
        evaluate: Callable[[], Any],
        controller: Literal["random", "evolution", "policy", "optuna"] | Controller = "evolution",
        train: Callable[[], Any] | None = None,
        costs: Sequence[Literal["flops", "size"] | Callable[[], Any]] = (),
        limits: Mapping[Literal["flops", "size"], NonNegativeFloat] | None = None,
        study: Any = None,
        metric: Name = "metric",
        seed: Seed = 0,
        batch: PositiveInt = 1,
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
    ) -> None:
        if not tool.space:
            raise SearchError(
                "Search: the tool has met no op with a choice; call tool.prepare(model, x) first"
            )
        self._tool, self._controller = tool, _make_controller(controller)
        # Training changes shared weights, so that the same architecture may score otherwise later.
        self._is_trained = train is not None
        names = [cost if isinstance(cost, str) else getattr(cost, "__name__", str(cost)) for cost in costs]
        if len({metric, *names}) < 1 + len(names):
            raise SearchError(
                f"Search: the metric is called {metric!r} and the costs {names}; give each a name of its own"
            )
        self._costs = dict(zip(names, costs, strict=True))
        self._limits, self._metric = dict(limits or {}), metric
        self._seed, self._batch, self._progress = seed, batch, progress
        self._program = SearchProgram(tool, evaluate, train, self._costs, metric, compiled)
        self._space, self._trials, self._stopped = tool.space, list[Trial](), ""
        # By identity: two trials of one architecture are equal, and the controller learns from both.
        self._learned_ids: set[int] = set()
        # Evaluated, but not in the study yet: its storage may fail.
        self._unwritten: list[Trial] = []
        self._study = self._open_study(study, names)
        self._sync_trials()

    def _open_study(self, study: Any, cost_names: Sequence[str]) -> StudyTrials | None:
        """Return the trials of a study, or of the study of Optuna's controller; None without a study.

        Optuna's controller gets the trials too.  Raises SearchError if it has another study.
        """
        controller = self._controller
        if isinstance(controller, OptunaController):
            if study is not None and controller.study is not None:
                raise SearchError(
                    f"Search: study is {shown(study)}, and the controller has another; give one of them"
                )
            study = controller.study if study is None else study
            controller.trials = StudyTrials(study, self._space, cost_names, controller.sampler)
            return controller.trials
        return None if study is None else StudyTrials(study, self._space, cost_names)

    @property
    def result(self) -> SearchResult:
        """The trials so far."""
        return SearchResult([*self._trials, *self._unwritten], self._metric, list(self._costs), self._stopped)

    @checked(error=SearchError)
    def run(
        self,
        trials: NonNegativeInt | None = None,
        seconds: NonNegativeFloat | None = None,
        jobs: int | None = None,
    ) -> SearchResult:
        """Evaluate architectures until there are so many trials, or so many seconds have passed.

        The tool then has the best architecture.  An exception in an evaluation is logged and becomes the
        trial's error, and so do a metric or cost of NaN or infinity, and the end of its process.  Errors of
        Amanda and of the study's storage, and KeyboardInterrupt, reach the caller; `result` has the trials so
        far, and another `run` continues.

        Args:
            trials: Number of trials, with those of earlier runs.
            seconds: Time after which no further batch begins.
            jobs: Number of processes that evaluate the architectures of a batch; -1 for one a core; None for
                1, or for those of the engine of `joblib.parallel_config`. They get copies of the tool and of
                the model, and give the same trials.

        Returns:
            The trials so far, with those of earlier runs.

        Raises:
            SearchError: Without a budget, for a tool that mixes its candidates, and for several jobs with
                `train`, or with a batch of 1.
        """
        if trials is None and seconds is None:
            raise SearchError("Search.run: the budget is None; give trials, seconds, or both")
        jobs = self._check_jobs(jobs)
        begin, self._stopped = perf_counter(), ""
        # Trials of another process, and those that an earlier run could not write.
        self._sync_trials()
        if self._tool.mixture:
            raise SearchError(
                "Search.run: the tool mixes its candidates; call tool.settle(), or mixture=False"
            )
        with Progress(self._progress) as progress, self._dropping_proposals():
            while not self._stopped:
                if trials is not None and len(self._trials) >= trials:
                    self._stopped = f"{trials} trials"
                elif seconds is not None and perf_counter() - begin >= seconds:
                    self._stopped = f"{seconds:g} seconds"
                elif not (architectures := self._next_architectures(trials)):
                    self._stopped = "every architecture that was drawn is known, or above the limits"
                else:
                    self._run_trials(architectures, jobs, progress, trials)
        if self.result.best is not None:
            self._tool.architecture = self.result.best.architecture
        return self.result

    def _check_jobs(self, jobs: int | None) -> int | None:
        """Return the number of jobs, 1 with `train`; raise SearchError where several cannot work."""
        if jobs not in (None, 1):
            if self._is_trained:
                raise SearchError(
                    f"Search.run: jobs is {jobs} with train, which changes the weights that architectures "
                    "share, and processes share none; give jobs=1, or train a finalized model in evaluate"
                )
            if self._batch == 1:
                raise SearchError(
                    f"Search.run: jobs is {jobs}, and Search has proposed architectures one by one; give it "
                    "batch=8, for example, for that many at a time"
                )
        # Without trials this checks the number alone, ahead of evaluations that may take hours.
        run_trials(self._program.load, [], jobs)
        return 1 if self._is_trained else jobs

    def _run_trials(
        self, architectures: Sequence[Mapping[str, str]], jobs: int | None, progress: Progress,
        total: int | None,
    ) -> None:  # fmt: skip
        """Evaluate the architectures of a batch, and add their trials in the order of the proposals."""
        texts = [" ".join(architecture.values()) for architecture in architectures]
        first_trial = len(self._trials)
        end = first_trial + len(architectures)
        pending = list(range(len(architectures)))  # numbers of the architectures without a trial
        finished: dict[int, Trial] = {}  # trials that ended ahead of earlier proposals, by number
        next_number = 0  # of the next trial to add
        total = total or end
        progress.begin(total, texts[0], first_trial)
        try:
            for outcome in run_trials(self._program.load, architectures, jobs):
                # The first of equal ones, as with `train` a batch may have an architecture twice.
                number = next(i for i in pending if architectures[i] == outcome.trial)
                trial = finished[number] = self._make_trial(outcome, texts[number])
                progress.begin(total, texts[number], end - len(pending))
                progress.done(trial.error or f"{self._metric} {trial.metric:g}")
                pending.remove(number)
                if pending:
                    # In this process the next; of several the one that began first.
                    progress.begin(total, texts[pending[0]], end - len(pending))
                while next_number in finished:
                    self._unwritten.append(finished.pop(next_number))
                    next_number += 1
                self._sync_trials()
        finally:
            # After an interrupt, those that ended ahead of others.
            if finished:
                self._unwritten += [finished[i] for i in sorted(finished)]
                self._sync_trials()

    def _make_trial(self, outcome: Outcome[Mapping[str, str], Measurements], text: str) -> Trial:
        """Return the trial of an outcome; if it has an error, without a metric, and with a warning."""
        measurements = outcome.value or Measurements({})
        error = outcome.error or measurements.error
        if error:
            logger.warning("no %s of %s: %s", self._metric, text, error)
        metric = None if error else measurements.numbers[self._metric]
        costs = {name: measurements.numbers.get(name, nan) for name in self._costs}
        return Trial(dict(outcome.trial), metric, costs, outcome.seconds, error)

    def _sync_trials(self) -> None:
        """Write trials to the study, read those of all processes; tell the controller whole batches."""
        if self._study is None:
            self._trials = [*self._trials, *self._unwritten]
            self._unwritten = []
        else:
            while self._unwritten:  # one by one, so that a storage that fails loses none
                self._study.add(self._unwritten[0])
                del self._unwritten[0]
            self._trials = self._study.read()
        # Batches begin at multiples of their size, and what precedes a batch is learned alone: a search that
        # goes on draws what one without a stop would.
        batches_end = len(self._trials) - len(self._trials) % self._batch
        for trial in self._trials[:batches_end]:
            if id(trial) not in self._learned_ids:
                self._learned_ids.add(id(trial))
                self._controller.tell(self._space, trial.architecture, trial.scores)

    @contextmanager
    def _dropping_proposals(self) -> Iterator[None]:
        """Return a context that drops unevaluated proposals of the study, also on an interrupt."""
        try:
            yield
        finally:
            # A trial that could not be written may still be a proposal's.
            if self._study is not None and not self._unwritten:
                self._study.drop_proposals()

    def _next_architectures(self, trials: int | None) -> list[dict[str, str]]:
        """Return the architectures of the rest of a batch; fewer, or none, where no others are left.

        One may come again where shared weights are trained between trials.

        trials: number after which the search ends; None for no such number.
        """
        trial_count = len(self._trials)
        size = self._batch - trial_count % self._batch  # the rest of the batch
        if trials is not None:
            size = min(size, trials - trial_count)
        tried = [dict(trial.architecture) for trial in self._trials]
        architectures: list[dict[str, str]] = []
        for number in range(trial_count, trial_count + size):
            architecture = self._next_architecture(number, [] if self._is_trained else tried)
            if architecture is None:
                break
            architectures.append(architecture)
            tried.append(architecture)
        return architectures

    def _next_architecture(self, number: int, tried: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
        """Draw an architecture within the limits that was not tried; None if many draws give none.

        The controller may repeat itself, so random architectures are drawn after many of its proposals.
        Raises SearchError for a proposal outside of the space.
        """
        numbers = np.random.default_rng([self._seed, number])
        if len(tried) >= prod(map(len, self._space.values())):
            return None
        calculators = {"flops": self._tool.flops, "size": self._tool.size}
        for draw in range(2 * _MAX_DRAWS):
            # A controller that has converged proposes what is known: the rest of the space is drawn at
            # random.
            source = self._controller if draw < _MAX_DRAWS else Random()
            architecture = source.ask(self._space, numbers)
            self._check_architecture(source, architecture)
            is_within = all(calculators[name](architecture) <= limit for name, limit in self._limits.items())
            if is_within and architecture not in tried:
                return architecture
        return None

    def _check_architecture(self, controller: Controller, architecture: Any) -> None:
        """Raise SearchError for a proposal that is not an architecture of the space."""
        is_valid = isinstance(architecture, Mapping) and architecture.keys() == self._space.keys()
        if not is_valid or any(label not in self._space[name] for name, label in architecture.items()):
            call_text = f"{type(controller).__name__}.ask gave {architecture!r}"
            raise SearchError(f"Search: {call_text}; give a dict from each name of {self._space} to a label")


def _make_controller(controller: str | Controller) -> Controller:
    """Return a new controller of a name, or the one given; raise SearchError for another object."""
    if isinstance(controller, str):
        return _CONTROLLERS[controller]()
    is_controller = all(callable(getattr(controller, name, None)) for name in ("ask", "tell"))
    # A class has the methods too, and is a likely slip.
    if not is_controller or isinstance(controller, type):
        controller_names = ", ".join(map(repr, _CONTROLLERS))
        raise SearchError(
            f"Search: controller is {controller!r}; give {controller_names}, or an object with ask and tell"
        )
    return controller


class Measurements(NamedTuple):
    """The metric and the costs of an architecture by name; NaN for what an error left unmeasured."""

    numbers: Mapping[str, float]
    error: str = ""


class SearchProgram:
    """Evaluates architectures of a tool; a pickled copy does so in a worker.

    costs: functions without arguments, or names of methods of the tool, by name.
    """

    def __init__(
        self,
        tool: SearchTool,
        evaluate: Callable[[], Any],
        train: Callable[[], Any] | None,
        costs: Mapping[str, Callable[[], Any] | str],
        metric: str,
        compiled: Literal["eager", "instrument"],
    ) -> None:
        self._tool, self._evaluate, self._train = tool, evaluate, train
        self._costs, self._metric = costs, metric
        self._compiled: Literal["eager", "instrument"] = compiled
        self._report, self._space, self._is_copy = amanda.Report(), tool.space, False

    def __getstate__(self) -> dict[str, Any]:
        # With the report, a worker does not log again what this process has logged.
        return {name: value for name, value in vars(self).items() if name != "_scope"} | {"_is_copy": True}

    @cached_property
    def _scope(self) -> amanda.Scope:
        """One scope for all trials, since a scope logs each warning once."""
        scope = amanda.apply(self._tool, compiled=self._compiled)
        scope.report = self._report
        return scope

    def load(self) -> Callable[[Mapping[str, str]], Measurements]:
        """Return `measure`; in a worker, raise SearchError if the tool has other choices there."""
        self._check_space()
        return self.measure

    def measure(self, architecture: Mapping[str, str]) -> Measurements:
        """Train, evaluate and measure costs; NaN, infinity or an exception that is not Amanda's is the error.

        The tool keeps the architecture.  Raises SearchError in a worker with other choices.
        """
        self._tool.architecture = architecture
        numbers = dict.fromkeys((self._metric, *self._costs), nan)
        try:
            # Each evaluation enters the scope again, so that between trials the program runs without the
            # tool.
            with self._scope:
                if self._train is not None:
                    self._train()
                numbers[self._metric] = check_number(self._evaluate(), self._evaluate, SearchError)
                for name, cost in self._costs.items():
                    function = getattr(self._tool, cost) if isinstance(cost, str) else cost
                    numbers[name] = check_number(function(), function, SearchError)
        except ToolError as error:
            # Most likely the tool lacks values for an op of another model, ahead of `_check_space`.
            if self._is_copy:
                raise SearchError(f"Search: in a worker {error}. {_COPIED_MODEL}") from error
            raise
        except AmandaError:
            raise
        except Exception as error:
            return Measurements(numbers, f"{type(error).__name__}: {error}")
        self._check_space()
        for name, number in numbers.items():
            if not isfinite(number):
                return Measurements(numbers, f"ValueError: {name} is {number}")
        return Measurements(numbers)

    def _check_space(self) -> None:
        """Raise SearchError in a worker whose tool meets other ops than that of the search."""
        if self._is_copy and self._tool.space != self._space:
            raise SearchError(
                f"Search: in a worker the tool has the choices {self._tool.space}, and not {self._space}. "
                f"{_COPIED_MODEL}"
            )

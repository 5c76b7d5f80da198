"""The search: a controller proposes architectures, the user's function evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, prod
from time import perf_counter
from typing import Any, Literal

import amanda
from amanda.options import Name, NonNegativeFloat, NonNegativeInt, Seed, checked, shown
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
from amanda.tools.trials import Progress, SearchResult, Trial, check_number

_CONTROLLERS: Mapping[str, Callable[[], Controller]] = {
    "random": Random, "evolution": Evolution, "policy": PolicyGradient, "optuna": OptunaController,
}  # fmt: skip
_MAX_DRAWS = 1000


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
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
    ) -> None:
        if not tool.space:
            raise SearchError(
                "Search: the tool has met no op with a choice; call tool.prepare(model, x) first"
            )
        # Made here, so that each search has a controller of its own.
        if isinstance(controller, str):
            controller = _CONTROLLERS[controller]()
        is_controller = all(callable(getattr(controller, name, None)) for name in ("ask", "tell"))
        # A class has the methods too, and is a likely slip.
        if not is_controller or isinstance(controller, type):
            controller_names = ", ".join(map(repr, _CONTROLLERS))
            raise SearchError(
                f"Search: controller is {controller!r}; give {controller_names}, or an object with ask and "
                "tell"
            )
        self._tool, self._evaluate, self._controller, self._train = tool, evaluate, controller, train
        self._calculators = {"flops": tool.flops, "size": tool.size}
        names = [cost if isinstance(cost, str) else getattr(cost, "__name__", str(cost)) for cost in costs]
        if len({metric, *names}) <= len(names):
            raise SearchError(
                f"Search: the metric is called {metric!r} and the costs {names}; give each a name of its own"
            )
        self._costs = dict(zip(names, costs, strict=True))
        self._limits, self._metric = dict(limits or {}), metric
        self._seed, self._progress = seed, progress
        # One scope for all trials, since a scope logs each warning once.
        self._scope = amanda.apply(tool, compiled=compiled)
        self._space, self._trials, self._stopped = tool.space, list[Trial](), ""
        # Evaluated, but not in the study yet: its storage may fail.
        self._unwritten: list[Trial] = []
        self._study: StudyTrials | None = None
        if isinstance(controller, OptunaController):
            if study is not None and controller.study is not None:
                raise SearchError(
                    f"Search: study is {shown(study)}, and the controller has another; give one of them"
                )
            study = controller.study if study is None else study
            self._study = controller.trials = StudyTrials(study, self._space, names, controller.sampler)
        elif study is not None:
            self._study = StudyTrials(study, self._space, names)
        self._sync_trials()

    @property
    def result(self) -> SearchResult:
        """The trials so far."""
        return SearchResult([*self._trials, *self._unwritten], self._metric, list(self._costs), self._stopped)

    @checked(error=SearchError)
    def run(
        self, trials: NonNegativeInt | None = None, seconds: NonNegativeFloat | None = None
    ) -> SearchResult:
        """Evaluate architectures until there are so many trials, or so many seconds have passed.

        The tool then has the best architecture.  An exception in an evaluation is logged and becomes the
        trial's error, and so does a metric or cost of NaN or infinity.  Errors of Amanda and of the study's
        storage, and KeyboardInterrupt, reach the caller; `result` has the trials so far, and another `run`
        continues.
        """
        if trials is None and seconds is None:
            raise SearchError("Search.run: the budget is None; give trials, seconds, or both")
        begun, self._stopped = perf_counter(), ""
        self._sync_trials()
        if self._tool.mixture:
            raise SearchError(
                "Search.run: the tool mixes its candidates; call tool.settle(), or mixture=False"
            )
        with Progress(self._progress) as progress, self._dropping_proposals():
            while not self._stopped:
                if trials is not None and len(self._trials) >= trials:
                    self._stopped = f"{trials} trials"
                elif seconds is not None and perf_counter() - begun >= seconds:
                    self._stopped = f"{seconds:g} seconds"
                elif (architecture := self._next_architecture()) is None:
                    self._stopped = "every architecture that was drawn is known, or above the limits"
                else:
                    labels_text = " ".join(architecture.values())
                    progress.begin(trials or len(self._trials) + 1, labels_text, len(self._trials))
                    trial = self._run_trial(architecture)
                    self._unwritten.append(trial)
                    self._sync_trials()
                    progress.done(trial.error or f"{self._metric} {trial.metric:g}")
        if self.result.best is not None:
            self._tool.architecture = self.result.best.architecture
        return self.result

    def _sync_trials(self) -> None:
        """Write trials to the study, read those of all processes, and pass new ones to the controller."""
        if self._study is None:
            trials = [*self._trials, *self._unwritten]
            self._unwritten = []
        else:
            while self._unwritten:  # one by one, so that a storage that fails loses none
                self._study.add(self._unwritten[0])
                del self._unwritten[0]
            trials = self._study.read()
        # By identity: two trials of one architecture are equal, and the controller learns from both.
        earlier_ids = set(map(id, self._trials))
        self._trials = trials
        for trial in trials:
            if id(trial) not in earlier_ids:
                self._controller.tell(self._space, trial.architecture, trial.scores)

    @contextmanager
    def _dropping_proposals(self) -> Iterator[None]:
        """Return a context that drops an unevaluated proposal of the study, also on an interrupt."""
        try:
            yield
        finally:
            # A trial that could not be written may still be the proposal's.
            if self._study is not None and not self._unwritten:
                self._study.drop_proposal()

    def _next_architecture(self) -> dict[str, str] | None:
        """Return an architecture within the limits, without `train` a new one; None if there is none.

        The controller may repeat itself, so random architectures are drawn after many of its proposals.
        """
        # By the number of trials: a search that goes on draws what one without a stop would.
        numbers = np.random.default_rng([self._seed, len(self._trials)])
        # Training changes shared weights, so that the same architecture may score otherwise later.
        tried = [] if self._train is not None else [dict(trial.architecture) for trial in self._trials]
        if len(tried) >= prod(map(len, self._space.values())):
            return None
        for draw in range(2 * _MAX_DRAWS):
            # A controller that has converged proposes what is known: the rest of the space is drawn at
            # random.
            source = self._controller if draw < _MAX_DRAWS else Random()
            architecture = source.ask(self._space, numbers)
            self._check_architecture(source, architecture)
            is_within = all(
                self._calculators[name](architecture) <= limit for name, limit in self._limits.items()
            )
            if is_within and architecture not in tried:
                return architecture
        return None

    def _check_architecture(self, controller: Controller, architecture: Any) -> None:
        """Raise SearchError for a proposal that is not an architecture of the space."""
        is_valid = isinstance(architecture, Mapping) and architecture.keys() == self._space.keys()
        if not is_valid or any(label not in self._space[name] for name, label in architecture.items()):
            call_text = f"{type(controller).__name__}.ask gave {architecture!r}"
            raise SearchError(f"Search: {call_text}; give a dict from each name of {self._space} to a label")

    def _run_trial(self, architecture: Mapping[str, str]) -> Trial:
        """Train and evaluate an architecture, and return its trial, with an error if it failed."""
        self._tool.architecture = architecture
        # NaN for all that is not measured when an evaluation fails.
        begin, numbers = perf_counter(), dict.fromkeys((self._metric, *self._costs), float("nan"))

        def measure() -> float:
            """Train, evaluate and measure costs; return the metric.  Raises ValueError unless finite."""
            # Each evaluation enters the scope again, so that between trials the program runs without the
            # tool.
            with self._scope:
                if self._train is not None:
                    self._train()
                numbers[self._metric] = check_number(self._evaluate(), self._evaluate, SearchError)
                for name, cost in self._costs.items():
                    value = self._calculators[name]() if isinstance(cost, str) else cost()
                    numbers[name] = check_number(value, cost, SearchError)
            for name, number in numbers.items():
                if not isfinite(number):
                    raise ValueError(f"{name} is {number}")
            return numbers[self._metric]

        metric, error = Progress.attempt(measure, f"no {self._metric} of {' '.join(architecture.values())}")
        costs = {name: numbers[name] for name in self._costs}
        return Trial(dict(architecture), metric, costs, perf_counter() - begin, error)

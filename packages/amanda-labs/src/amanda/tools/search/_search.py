"""The search: a controller proposes architectures, the user's function evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, prod
from time import perf_counter
from typing import Any, Literal

import amanda
from amanda.options import Name, NonNegativeFloat, NonNegativeInt, Seed, checked, shown
from amanda.tools.kit import Progress, check_number
from amanda.tools.libraries import numpy as np
from amanda.tools.search._controllers import Controller, Evolution, PolicyGradient, Random
from amanda.tools.search._errors import SearchError
from amanda.tools.search._optuna import OptunaController, StudyTrials
from amanda.tools.search._tool import SearchTool
from amanda.tools.trials import SearchResult, Trial

_CONTROLLERS: Mapping[str, Callable[[], Controller]] = {
    "random": Random, "evolution": Evolution, "policy": PolicyGradient, "optuna": OptunaController,
}  # fmt: skip
_DRAWS = 1000


class Search:
    """Tries architectures of a tool, and keeps what a metric and costs are of each.

    tool: prepared, so that its ops are known.  evaluate: a function of no arguments that gives a number, the
        higher the better, with the architecture in force; what it trains is trained for those that follow.
    controller: "random", "evolution", "policy", "optuna", or a `Controller`.
    train: called ahead of each evaluation with the architecture in force, to train what architectures share.
    costs: "flops", "size", or functions of no arguments, such as one that measures a latency; they are called
        with the architecture in force, and the lower the better.
    limits: the most of "flops" or "size"; architectures above it are not evaluated.
    study: a study of Optuna that keeps the trials, and from which `run` goes on; or a storage of Optuna or
        its URL, in which a study is made.  Searches in several processes may share one: each has the trials
        of all.
    metric: what the number is called.  seed: of the controller.  progress: whether stderr tells how far
    it is.  compiled: as of `amanda.apply`.

    No architecture is evaluated twice, except where `train` is given.  Raises SearchError for what cannot be.
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
        if isinstance(controller, str):
            controller = _CONTROLLERS[controller]()
        is_one = all(callable(getattr(controller, name, None)) for name in ("ask", "tell"))
        if not is_one or isinstance(controller, type):
            known = ", ".join(map(repr, _CONTROLLERS))
            raise SearchError(
                f"Search: controller is {controller!r}; give {known}, or an object with ask and tell"
            )
        self._tool, self._evaluate, self._controller, self._train = tool, evaluate, controller, train
        self._calculated = {"flops": tool.flops, "size": tool.size}
        names = [one if isinstance(one, str) else getattr(one, "__name__", str(one)) for one in costs]
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
        self._read()

    @property
    def result(self) -> SearchResult:
        """The trials so far."""
        return SearchResult([*self._trials, *self._unwritten], self._metric, list(self._costs), self._stopped)

    @checked(error=SearchError)
    def run(
        self, trials: NonNegativeInt | None = None, seconds: NonNegativeFloat | None = None
    ) -> SearchResult:
        """Evaluate architectures until there are so many trials, or so many seconds have passed.

        Afterwards the best architecture is the tool's.  An exception in an evaluation is kept as that
        trial's error, and logged, and so is a metric or cost of NaN or infinity.  Amanda's own errors and
        KeyboardInterrupt reach the caller, and so do those of the study's storage; `result` has the trials
        until then, and another `run` continues.
        """
        if trials is None and seconds is None:
            raise SearchError("Search.run: the budget is None; give trials, seconds, or both")
        begun, self._stopped = perf_counter(), ""
        self._read()
        if self._tool.mixture:
            raise SearchError(
                "Search.run: the tool mixes its candidates; call tool.settle(), or mixture=False"
            )
        with Progress(self._progress) as progress, self._proposals_dropped():
            while not self._stopped:
                if trials is not None and len(self._trials) >= trials:
                    self._stopped = f"{trials} trials"
                elif seconds is not None and perf_counter() - begun >= seconds:
                    self._stopped = f"{seconds:g} seconds"
                elif (architecture := self._next()) is None:
                    self._stopped = "every architecture that was drawn is known, or above the limits"
                else:
                    told = " ".join(architecture.values())
                    progress.begin(trials or len(self._trials) + 1, told, len(self._trials))
                    trial = self._trial(architecture)
                    self._unwritten.append(trial)
                    self._read()
                    progress.done(trial.error or f"{self._metric} {trial.metric:g}")
        if self.result.best is not None:
            self._tool.architecture = self.result.best.architecture
        return self.result

    def _read(self) -> None:
        """Write what was evaluated, take what others have too, and tell the controller of what is new."""
        if self._study is None:
            trials = [*self._trials, *self._unwritten]
            self._unwritten = []
        else:
            while self._unwritten:
                self._study.add(self._unwritten[0])
                del self._unwritten[0]
            trials = self._study.read()
        known = set(map(id, self._trials))
        self._trials = trials
        for trial in trials:
            if id(trial) not in known:
                self._controller.tell(self._space, trial.architecture, trial.scores)

    @contextmanager
    def _proposals_dropped(self) -> Iterator[None]:
        """Leave no proposal of the study behind that is not evaluated, after an interrupt too."""
        try:
            yield
        finally:
            if self._study is not None and not self._unwritten:
                self._study.drop()

    def _next(self) -> dict[str, str] | None:
        """Return an architecture within the limits, a new one if nothing is trained; None without one."""
        numbers = np.random.default_rng([self._seed, len(self._trials)])
        known = [] if self._train is not None else [dict(one.architecture) for one in self._trials]
        if len(known) >= prod(map(len, self._space.values())):
            return None
        for draw in range(2 * _DRAWS):
            source = self._controller if draw < _DRAWS else Random()
            found = source.ask(self._space, numbers)
            self._check(source, found)
            is_within = all(self._calculated[name](found) <= most for name, most in self._limits.items())
            if is_within and found not in known:
                return found
        return None

    def _check(self, controller: Controller, architecture: Any) -> None:
        """Raise SearchError for what is no architecture of the space."""
        is_one = isinstance(architecture, Mapping) and architecture.keys() == self._space.keys()
        if not is_one or any(label not in self._space[name] for name, label in architecture.items()):
            told = f"{type(controller).__name__}.ask gave {architecture!r}"
            raise SearchError(f"Search: {told}; give a dict from each name of {self._space} to a label")

    def _trial(self, architecture: Mapping[str, str]) -> Trial:
        self._tool.architecture = architecture
        begun, found = perf_counter(), dict.fromkeys((self._metric, *self._costs), float("nan"))

        def measure() -> float:
            with self._scope:
                if self._train is not None:
                    self._train()
                found[self._metric] = check_number(self._evaluate(), self._evaluate, SearchError)
                for name, cost in self._costs.items():
                    value = self._calculated[name]() if isinstance(cost, str) else cost()
                    found[name] = check_number(value, cost, SearchError)
            for name, number in found.items():
                if not isfinite(number):
                    raise ValueError(f"{name} is {number}")
            return found[self._metric]

        metric, error = Progress.attempt(measure, f"no {self._metric} of {' '.join(architecture.values())}")
        costs = {name: found[name] for name in self._costs}
        return Trial(dict(architecture), metric, costs, perf_counter() - begun, error)

"""Optuna: a study keeps the trials of a search, and its sampler proposes architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda.options import shown
from amanda.tools.libraries import numpy as np
from amanda.tools.search._controllers import Architecture, Random, Space
from amanda.tools.search._errors import SearchError
from amanda.tools.trials import Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

_TRIES = 5
"""Proposals in a row that are known, or above the limits, after which architectures are drawn at random."""


class StudyTrials:
    """The trials of a search in a study of Optuna (Akiba et al. 2019), to which other processes may add.

    Each choice is a categorical parameter of the study.  A proposal that is not evaluated, or that fails,
    is a failed trial of the study.

    study: with the direction "maximize" for the metric, and "minimize" for each cost; or a storage or its
    URL, in which the study "search" is made or continued; None makes one in memory.  sampler: of a study that
    is made; None for TPE (Bergstra et al. 2011), which is seeded anew for each trial.
    Raises SearchError where Optuna is not installed, and for a study of something else.
    """

    def __init__(
        self, study: Study | BaseStorage | str | None, space: Space, costs: Sequence[str],
        sampler: BaseSampler | None = None,
    ) -> None:  # fmt: skip
        self._optuna, self._space, self._costs = _optuna("Search"), space, costs
        directions: list[Any] = ["maximize", *("minimize" for _ in costs)]
        self._is_seeded_anew = sampler is None and not isinstance(study, self._optuna.Study)
        if not isinstance(study, self._optuna.Study):
            study = self._continued(study, directions, sampler)
        present = [one.name.lower() for one in study.directions]
        if present != directions:
            names = ", ".join(["the metric", *costs])
            raise SearchError(f"Search: directions are {present}; give {directions}, for {names}")
        self.study = study
        self._distributions = {
            name: self._optuna.distributions.CategoricalDistribution(tuple(labels))
            for name, labels in space.items()
        }
        self._evaluated: dict[int, Trial] = {}
        self._asked: Any = None

    def _continued(self, storage: Any, directions: Any, sampler: BaseSampler | None) -> Study:
        """Return the study "search" of a storage, or a new one in memory."""
        if not isinstance(storage, (str, self._optuna.storages.BaseStorage, type(None))):
            raise SearchError(
                f"Search: study is {shown(storage)}; give a study of Optuna, or a storage or its URL"
            )
        name = None if storage is None else "search"
        try:
            study: Study = self._optuna.create_study(
                storage=storage, sampler=sampler, study_name=name, directions=directions, load_if_exists=True
            )  # fmt: skip
        except Exception as error:  # each database has errors of its own
            raise SearchError(
                f"Search: study is {shown(storage)}, which cannot be opened: {error}"
            ) from error
        return study

    def read(self) -> list[Trial]:
        """Return the trials that were evaluated, by any process, in the order of their numbers."""
        states = self._optuna.trial.TrialState
        for one in self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL)):
            # Proposals that were not evaluated have neither values nor an error.
            if one.number not in self._evaluated and (one.values or "error" in one.user_attrs):
                self._evaluated[one.number] = self._trial(one)
        return [trial for _, trial in sorted(self._evaluated.items())]

    def _trial(self, frozen: FrozenTrial) -> Trial:
        if frozen.distributions != self._distributions:
            space = {name: getattr(kind, "choices", kind) for name, kind in frozen.distributions.items()}
            place = f"trial {frozen.number} of {self.study.study_name!r} is over {space}"
            raise SearchError(f"Search: {place}, not over {dict(self._space)}")
        duration = 0.0 if frozen.duration is None else frozen.duration.total_seconds()
        metric, *costs = frozen.values or [None, *(float("nan") for _ in self._costs)]
        return Trial(
            {name: frozen.params[name] for name in self._space}, metric,
            dict(zip(self._costs, costs, strict=True)), frozen.user_attrs.get("seconds", duration),
            frozen.user_attrs.get("error", ""),
        )  # fmt: skip

    def ask(self, numbers: np.random.Generator) -> Architecture:
        """Return what the study's sampler proposes."""
        self.drop()
        if self._is_seeded_anew:
            self.study.sampler = self._optuna.samplers.TPESampler(seed=int(numbers.integers(2**31)))
        self._asked = self.study.ask(self._distributions)
        return {name: self._asked.params[name] for name in self._space}

    def drop(self) -> None:
        """Mark a proposal that was not evaluated as failed, which samplers do not count."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.study.tell(asked, state=self._optuna.trial.TrialState.FAIL)

    def add(self, trial: Trial) -> None:
        """Add a trial that was evaluated to the study."""
        states = self._optuna.trial.TrialState
        state, values = states.FAIL, None
        if trial.metric is not None:
            state, values = states.COMPLETE, [trial.metric, *trial.costs.values()]
        if self._asked is not None and self._asked.params == trial.architecture:
            asked, self._asked = self._asked, None
            if trial.error:
                asked.set_user_attr("error", trial.error)
            self.study.tell(asked, values, state=state)
            return
        self.drop()
        made = self._optuna.trial.create_trial(
            state=state, params=dict(trial.architecture), distributions=self._distributions, values=values,
            user_attrs={"seconds": trial.seconds, "error": trial.error},
        )  # fmt: skip
        self.study.add_trial(made)


class OptunaController(Random):
    """Asks the sampler of a study of Optuna, which keeps the trials.

    study: a study with the direction "maximize" for the metric, and "minimize" for each cost; or a sampler
    for a study that the search makes.  trials: those of the search that asks, which sets them.
    Raises SearchError where Optuna is not installed, and for a study of something else.
    """

    def __init__(self, study: Study | BaseSampler | None = None) -> None:
        optuna = _optuna("OptunaController")
        is_study = isinstance(study, optuna.Study)
        if not is_study and not isinstance(study, (optuna.samplers.BaseSampler, type(None))):
            raise SearchError(
                f"OptunaController: study is {shown(study)}; give a study or a sampler of Optuna"
            )
        self.study: Any = study if is_study else None
        self.sampler: Any = None if is_study else study
        self.trials: StudyTrials | None = None
        self._tries = 0

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return what the sampler proposes; a random architecture after many proposals in vain."""
        if self.trials is None:
            raise SearchError("OptunaController: it has no study yet; give it to a Search, which makes one")
        self._tries += 1
        if self._tries > _TRIES:
            return super().ask(space, numbers)
        return self.trials.ask(numbers)

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Begin to count proposals anew; the study itself has the trial."""
        self._tries = 0


def _optuna(name: str) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SearchError(f'{name}: it needs Optuna: pip install "amanda-labs[optuna]"') from error
    return optuna

"""Optuna as a controller: its samplers propose architectures, and its storages keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda.options import shown
from amanda.tools.libraries import numpy as np
from amanda.tools.search._controllers import Architecture, Random, Space
from amanda.tools.search._errors import SearchError
from amanda.tools.search._result import Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

_TRIES = 5
"""Proposals in a row that are known, or above the limits, after which architectures are drawn at random."""


class OptunaController(Random):
    """Asks a study of Optuna (Akiba et al. 2019), in which each choice is a categorical parameter.

    study: a study with the direction "maximize" for the metric, and "minimize" for each cost, whose trials
    are those of the search; or a sampler for a study in memory.  Without either this study is sampled by TPE
    (Bergstra et al. 2011), which is seeded anew for each trial.

    A proposal that is not evaluated, or that fails, is a failed trial of the study.  Raises SearchError where
    Optuna is not installed, and for a study of something else.
    """

    def __init__(self, study: Study | BaseSampler | None = None) -> None:
        try:
            import optuna
        except ImportError as error:
            told = 'it needs Optuna: pip install "amanda-tools[optuna]"'
            raise SearchError(f"OptunaController: {told}") from error
        if study is not None and not isinstance(study, (optuna.Study, optuna.samplers.BaseSampler)):
            raise SearchError(
                f"OptunaController: study is {shown(study)}; give a study or a sampler of Optuna"
            )
        self._optuna, self._given = optuna, study
        self._study: Study | None = study if isinstance(study, optuna.Study) else None
        self._asked: Any = None
        self._tries = 0

    def begin(self, space: Space, costs: Sequence[str]) -> list[Trial]:
        """Return the trials that the study has; make a study if none was given."""
        wanted: list[Any] = ["maximize", *("minimize" for _ in costs)]
        if self._study is None:
            sampler: Any = self._given
            self._study = self._optuna.create_study(directions=wanted, sampler=sampler)
        directions = [one.name.lower() for one in self._study.directions]
        if directions != wanted:
            names = ", ".join(["the metric", *costs])
            raise SearchError(f"OptunaController: directions are {directions}; give {wanted}, for {names}")
        done = self._study.get_trials(states=[self._optuna.trial.TrialState.COMPLETE])
        for one in done:
            if one.distributions != self._distributions(space):
                found = {name: getattr(kind, "choices", kind) for name, kind in one.distributions.items()}
                told = f"trial {one.number} of {self._study.study_name!r} is over {found}"
                raise SearchError(f"OptunaController: {told}, not over {dict(space)}")
        return [
            Trial(
                {name: one.params[name] for name in space}, one.values[0],
                dict(zip(costs, one.values[1:], strict=True)),
                0.0 if one.duration is None else one.duration.total_seconds(),
            )
            for one in done
        ]  # fmt: skip

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return what the sampler proposes; a random architecture after many proposals in vain."""
        self._drop()
        self._tries += 1
        if self._tries > _TRIES:
            return super().ask(space, numbers)
        if self._given is None:
            self._known.sampler = self._optuna.samplers.TPESampler(seed=int(numbers.integers(2**31)))
        self._asked = self._known.ask(self._distributions(space))
        return {name: self._asked.params[name] for name in space}

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Add an architecture to the study."""
        state = self._optuna.trial.TrialState.COMPLETE if scores else self._optuna.trial.TrialState.FAIL
        values = [scores[0], *(-one for one in scores[1:])] if scores else None
        if self._asked is not None and self._asked.params == architecture:
            self._known.tell(self._asked, values, state=state)
            self._asked = None
        else:
            made = self._optuna.trial.create_trial(
                state=state,
                params=dict(architecture),
                distributions=self._distributions(space),
                values=values,
            )
            self._known.add_trial(made)
        self._tries = 0

    @property
    def _known(self) -> Study:
        if self._study is None:
            raise SearchError("OptunaController: it has no study yet; give it to a Search, which makes one")
        return self._study

    def _distributions(self, space: Space) -> dict[str, BaseDistribution]:
        return {
            name: self._optuna.distributions.CategoricalDistribution(tuple(labels))
            for name, labels in space.items()
        }

    def _drop(self) -> None:
        """Mark a proposal that was not evaluated as failed, which samplers do not count."""
        if self._asked is not None:
            self._known.tell(self._asked, state=self._optuna.trial.TrialState.FAIL)
            self._asked = None

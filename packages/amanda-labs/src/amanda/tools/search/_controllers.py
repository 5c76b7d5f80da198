"""Controllers: propose the next architecture from the trials so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from amanda.options import NonNegativeFloat, PositiveInt, Share, checked, shown
from amanda.tools.libraries import numpy as np
from amanda.tools.search._candidates import SearchError
from amanda.tools.trials import Trial, dominates

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

Space = Mapping[str, Sequence[str]]
Architecture = dict[str, str]


@runtime_checkable
class Controller(Protocol):
    """Proposes architectures, and learns from their scores.

    `numbers` is seeded anew for each trial, so that a continued search proposes the same as one without stop.
    """

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return an architecture to be evaluated.

        Args:
            space: Sites and the labels that each can have.
            numbers: Generator of random numbers of the search.
        """
        ...

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Learn the scores of an architecture.

        Args:
            space: Sites and the labels that each can have.
            architecture: Label of each site.
            scores: The metric, then negative costs; empty if the evaluation failed.
        """
        ...


class Random:
    """Draws each candidate with equal probability."""

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return a random architecture."""
        return {name: labels[int(numbers.integers(len(labels)))] for name, labels in space.items()}

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Learn nothing."""


class Evolution(Random):
    """Regularised evolution (Real et al. 2019, algorithm 1): the best of some has a child, the oldest dies.

    Args:
        population: Its size.
        sample: Number of members that compete to be the parent; they are drawn without replacement (the paper
            draws with replacement).  A child differs from its parent at one op.  With costs, the parent is
            the member of the sample that the fewest of the sample dominate, and the oldest dominated member
            dies.
    """

    @checked(error=SearchError)
    def __init__(self, population: PositiveInt = 20, sample: PositiveInt = 5) -> None:
        self._population, self._sample = population, sample
        self._alive: list[tuple[Architecture, tuple[float, ...]]] = []

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return a random architecture until the population is full, then a child."""
        if len(self._alive) < self._population:
            return super().ask(space, numbers)
        # From the generator of the trial, not from one of this object: a continued search draws the same.
        drawn_indices = numbers.choice(len(self._alive), min(self._sample, len(self._alive)), replace=False)
        sample = [self._alive[i] for i in drawn_indices]
        # With one score, to be dominated by none is to be the best; with several it is to be on the front.
        parent, _ = min(sample, key=lambda member: self._count_dominators(member[1], sample))
        name = list(space)[numbers.integers(len(space))]
        # The mutated op changes in any case.
        other_labels = [label for label in space[name] if label != parent[name]]
        return {**parent, name: other_labels[numbers.integers(len(other_labels))]}

    @staticmethod
    def _count_dominators(scores: Sequence[float], sample: Sequence[tuple[Any, Sequence[float]]]) -> int:
        """Return the number of members of a sample whose scores dominate these."""
        return sum(dominates(rival, scores) for _, rival in sample)

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Add an architecture to the population; from a full one, remove the oldest.

        With costs, the oldest that another member dominates is removed.  Without scores nothing is added.
        """
        if scores:
            self._alive.append((dict(architecture), tuple(scores)))
        # Age decides who dies, not the score: an architecture that was lucky once does not stay for ever.
        if len(self._alive) > self._population:
            has_costs, oldest = len(scores) > 1, 0
            dominated = (
                i for i, (_, member_scores) in enumerate(self._alive)
                if self._count_dominators(member_scores, self._alive)
            )  # fmt: skip
            oldest_dominated = next(dominated, oldest)
            del self._alive[oldest_dominated if has_costs else oldest]


class PolicyGradient:
    """A policy trained by REINFORCE with a moving average as baseline (Williams 1992; Pham et al. 2018).

    The probabilities of each op's candidates are a softmax of the op's logits; ENAS has an LSTM instead.

    Args:
        rate: Of learning.
        decay: Of the baseline.  The reward is the metric.
    """

    @checked(error=SearchError)
    def __init__(self, rate: NonNegativeFloat = 1.0, decay: Share = 0.9) -> None:
        self._rate, self._decay = rate, decay
        self._logits: dict[str, Any] = {}
        self._baseline: float | None = None

    def probabilities(self, space: Space) -> dict[str, Any]:
        """Return the probabilities of the candidates of each op, equal ones for an op that is new."""
        probabilities = {}
        for name, labels in space.items():
            logits = self._logits.setdefault(name, np.zeros(len(labels)))
            # The largest is subtracted, so that exp cannot overflow.
            exponents = np.exp(logits - logits.max())
            probabilities[name] = exponents / exponents.sum()
        return probabilities

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return an architecture drawn from the policy.

        Args:
            space: As in `Controller.ask`.
            numbers: As in `Controller.ask`.
        """
        probabilities = self.probabilities(space)
        return {
            name: labels[int(numbers.choice(len(labels), p=probabilities[name]))]
            for name, labels in space.items()
        }

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Raise the probabilities of an architecture above the baseline, lower those of one below it.

        Args:
            space: As in `Controller.tell`.
            architecture: As in `Controller.tell`.
            scores: As in `Controller.tell`; without any nothing changes.
        """
        if not scores:
            return
        reward = scores[0]
        # The first reward is its own baseline, and changes nothing.
        advantage = 0.0 if self._baseline is None else reward - self._baseline
        for name, probabilities in self.probabilities(space).items():
            one_hot = np.zeros(len(probabilities))
            one_hot[list(space[name]).index(architecture[name])] = 1
            # The gradient of the log probability of a softmax: one at what was drawn, less the probabilities.
            self._logits[name] += self._rate * advantage * (one_hot - probabilities)
        baseline = reward if self._baseline is None else self._baseline
        self._baseline = self._decay * baseline + (1 - self._decay) * reward


_MAX_REPEATED_PROPOSALS = 5
"""Proposals in a row that were tried or are above the limits, after which architectures are random."""


class StudyTrials:
    """The trials of a search in a study of Optuna (Akiba et al. 2019), to which other processes may add.

    Each decision is a categorical parameter of the study.  A proposal that is not evaluated, or that fails,
    is a failed trial of the study.

    study: with the direction "maximize" for the metric, and "minimize" for each cost; or a storage or its
    URL, in which the study "search" is created or continued; None creates one in memory.  sampler: of a study
    that is created; None for TPE (Bergstra et al. 2011), which is seeded anew for each trial.
    Raises SearchError if Optuna is not installed, and for a study with other directions.
    """

    def __init__(
        self, study: Study | BaseStorage | str | None, space: Space, costs: Sequence[str],
        sampler: BaseSampler | None = None,
    ) -> None:  # fmt: skip
        self._optuna, self._space, self._costs = _import_optuna("Search"), space, costs
        directions: list[Any] = ["maximize", *("minimize" for _ in costs)]
        # A sampler of the user's, or in a study of the user's, keeps its own seed.
        self._seeds_sampler = sampler is None and not isinstance(study, self._optuna.Study)
        if not isinstance(study, self._optuna.Study):
            study = self._open_study(study, directions, sampler)
        study_directions = [direction.name.lower() for direction in study.directions]
        if study_directions != directions:
            names = ", ".join(["the metric", *costs])
            raise SearchError(f"Search: directions are {study_directions}; give {directions}, for {names}")
        self.study = study
        self._distributions = {
            name: self._optuna.distributions.CategoricalDistribution(tuple(labels))
            for name, labels in space.items()
        }
        # By number.  The same objects at each read: `Search` tells new trials apart by identity.
        self._evaluated: dict[int, Trial] = {}
        self._proposals: list[Any] = []

    def _open_study(self, storage: Any, directions: Any, sampler: BaseSampler | None) -> Study:
        """Open the study "search" of a storage, or a new one in memory; raise SearchError if that fails."""
        if not isinstance(storage, (str, self._optuna.storages.BaseStorage, type(None))):
            raise SearchError(
                f"Search: study is {shown(storage)}; give a study of Optuna, or a storage or its URL"
            )
        # In a storage the name leads a later process to the same study.
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
        """Return the trials that were evaluated, by any process, in the order of their numbers.

        Raises SearchError for a trial over another space.
        """
        states = self._optuna.trial.TrialState
        # Without copies: nothing here writes to them.
        for frozen in self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL)):
            # Proposals that were not evaluated have neither values nor an error.
            if frozen.number not in self._evaluated and (frozen.values or "error" in frozen.user_attrs):
                self._evaluated[frozen.number] = self._read_trial(frozen)
        return [trial for _, trial in sorted(self._evaluated.items())]

    def _read_trial(self, frozen: FrozenTrial) -> Trial:
        """Return a trial of the study; raise SearchError if it is over another space."""
        # Trials over other candidates cannot be compared, and a sampler would fail later on.
        if frozen.distributions != self._distributions:
            space = {
                name: getattr(distribution, "choices", distribution)
                for name, distribution in frozen.distributions.items()
            }
            trial_text = f"trial {frozen.number} of {self.study.study_name!r} is over {space}"
            raise SearchError(f"Search: {trial_text}, not over {dict(self._space)}")
        duration = 0.0 if frozen.duration is None else frozen.duration.total_seconds()
        failed_values: list[Any] = [None, *(float("nan") for _ in self._costs)]
        metric, *costs = frozen.values or failed_values
        return Trial(
            {name: frozen.params[name] for name in self._space}, metric,
            dict(zip(self._costs, costs, strict=True)), frozen.user_attrs.get("seconds", duration),
            frozen.user_attrs.get("error", ""),
        )  # fmt: skip

    def ask(self, numbers: np.random.Generator) -> Architecture:
        """Return the architecture that the study's sampler proposes, which stays a proposal until `add`."""
        if self._seeds_sampler:
            self.study.sampler = self._optuna.samplers.TPESampler(seed=int(numbers.integers(2**31)))
        self._proposals.append(self.study.ask(self._distributions))
        return {name: self._proposals[-1].params[name] for name in self._space}

    def drop_proposal(self) -> None:
        """Mark the last proposal as failed, since samplers ignore failed trials; no effect without one."""
        if self._proposals:
            self.study.tell(self._proposals.pop(), state=self._optuna.trial.TrialState.FAIL)

    def drop_proposals(self) -> None:
        """Mark all proposals that were not evaluated as failed."""
        while self._proposals:
            self.drop_proposal()

    def add(self, trial: Trial) -> None:
        """Add a trial that was evaluated to the study; one without a metric as a failed trial."""
        states = self._optuna.trial.TrialState
        state, values = states.FAIL, None
        if trial.metric is not None:
            state, values = states.COMPLETE, [trial.metric, *trial.costs.values()]
        proposal = next(
            (proposal for proposal in self._proposals if proposal.params == trial.architecture), None
        )
        # The study's sampler learns from what it proposed; any other trial is added as it is.
        if proposal is not None:
            self._proposals.remove(proposal)
            if trial.error:
                proposal.set_user_attr("error", trial.error)
            self.study.tell(proposal, values, state=state)
            return
        frozen = self._optuna.trial.create_trial(
            state=state, params=dict(trial.architecture), distributions=self._distributions, values=values,
            user_attrs={"seconds": trial.seconds, "error": trial.error},
        )  # fmt: skip
        self.study.add_trial(frozen)


class OptunaController(Random):
    """Proposes what the sampler of a study of Optuna proposes; the study keeps the trials.

    Args:
        study: A study with the direction "maximize" for the metric, and "minimize" for each cost; or a
            sampler for a study that the search creates.

    Raises:
        SearchError: If Optuna is not installed, and for another object.
    """

    def __init__(self, study: Study | BaseSampler | None = None) -> None:
        optuna = _import_optuna("OptunaController")
        is_study = isinstance(study, optuna.Study)
        if not is_study and not isinstance(study, (optuna.samplers.BaseSampler, type(None))):
            raise SearchError(
                f"OptunaController: study is {shown(study)}; give a study or a sampler of Optuna"
            )
        self.study: Any = study if is_study else None
        self.sampler: Any = None if is_study else study
        self.trials: StudyTrials | None = None
        # The generator is another one for each trial: it tells whether the last proposal was accepted.
        self._numbers: np.random.Generator | None = None
        self._tries = 0

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return the sampler's proposal; a random architecture after too many that were tried already.

        A proposal that the Search has refused fails in the study.
        Raises SearchError for a controller that no Search has.
        """
        if self.trials is None:
            raise SearchError("OptunaController: it has no study yet; give it to a Search, which makes one")
        # Another generator is another trial; with the same one the Search has refused the last proposal.
        if numbers is not self._numbers:
            self._numbers, self._tries = numbers, 0
        elif self._tries <= _MAX_REPEATED_PROPOSALS:
            self.trials.drop_proposal()
        self._tries += 1
        # Samplers repeat themselves in a small space: random draws reach what is left of it.
        if self._tries > _MAX_REPEATED_PROPOSALS:
            return super().ask(space, numbers)
        return self.trials.ask(numbers)


def _import_optuna(name: str) -> Any:
    """Return the module optuna; raise SearchError with the install command if it is absent."""
    try:
        import optuna
    except ImportError as error:
        raise SearchError(f'{name}: it needs Optuna: pip install "amanda-labs[optuna]"') from error
    return optuna

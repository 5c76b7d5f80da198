"""Controllers: which architecture is tried next, by what is known of those before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from amanda.options import NonNegativeFloat, PositiveInt, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.search._errors import SearchError
from amanda.tools.trials import dominates

Space = Mapping[str, Sequence[str]]
Architecture = dict[str, str]


@runtime_checkable
class Controller(Protocol):
    """Proposes architectures, and is told what comes of them.

    `numbers` is seeded anew for each trial, so that a search goes on from a study as it would have gone on.
    """

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return an architecture to be evaluated."""
        ...

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Take the scores of an architecture: the metric, then negative costs; none where it failed."""
        ...


class Random:
    """Draws each candidate with equal probability."""

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return a random architecture."""
        return {name: labels[int(numbers.integers(len(labels)))] for name, labels in space.items()}

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Learn nothing."""


class Evolution(Random):
    """Regularised evolution (Real et al. 2019, algorithm 1): the oldest dies, the best of some has a child.

    population: how many live.  sample: how many of these compete to be the parent; they are drawn without
    replacement, where the paper draws with it.  A child differs from its parent at one op.  With costs, the
    parent is the one that the fewest others of the sample dominate, the first drawn of equal ones, and the
    oldest dies that another dominates.
    """

    @checked(error=SearchError)
    def __init__(self, population: PositiveInt = 20, sample: PositiveInt = 5) -> None:
        self._population, self._sample = population, sample
        self._alive: list[tuple[Architecture, tuple[float, ...]]] = []

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return a random architecture until the population is full, then a child."""
        if len(self._alive) < self._population:
            return super().ask(space, numbers)
        drawn = numbers.choice(len(self._alive), min(self._sample, len(self._alive)), replace=False)
        sample = [self._alive[i] for i in drawn]
        parent, _ = min(sample, key=lambda one: self._dominators(one[1], sample))
        name = list(space)[numbers.integers(len(space))]
        others = [label for label in space[name] if label != parent[name]]
        return {**parent, name: others[numbers.integers(len(others))]}

    @staticmethod
    def _dominators(scores: Sequence[float], sample: Sequence[tuple[Any, Sequence[float]]]) -> int:
        return sum(dominates(other, scores) for _, other in sample)

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Add an architecture to the population; the oldest leaves one that is full."""
        if scores:
            self._alive.append((dict(architecture), tuple(scores)))
        if len(self._alive) > self._population:
            ages = enumerate(self._alive) if len(scores) > 1 else ()
            del self._alive[next((i for i, one in ages if self._dominators(one[1], self._alive)), 0)]


class PolicyGradient:
    """A policy trained by REINFORCE with a moving average as baseline (Williams 1992; Pham et al. 2018).

    The probabilities of each op's candidates are a softmax of logits of its own, not of an LSTM as in ENAS.
    rate: of learning.  decay: of the baseline.  The reward is the metric.
    """

    @checked(error=SearchError)
    def __init__(self, rate: NonNegativeFloat = 1.0, decay: Share = 0.9) -> None:
        self._rate, self._decay = rate, decay
        self._logits: dict[str, Any] = {}
        self._baseline: float | None = None

    def probabilities(self, space: Space) -> dict[str, Any]:
        """Return the probability of each candidate of each op."""
        found = {}
        for name, labels in space.items():
            logits = self._logits.setdefault(name, np.zeros(len(labels)))
            exponents = np.exp(logits - logits.max())
            found[name] = exponents / exponents.sum()
        return found

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return an architecture drawn from the policy."""
        chances = self.probabilities(space)
        return {
            name: labels[int(numbers.choice(len(labels), p=chances[name]))] for name, labels in space.items()
        }

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Make what was better than the baseline more probable, and what was worse less."""
        if not scores:
            return
        reward = scores[0]
        advantage = 0.0 if self._baseline is None else reward - self._baseline
        for name, chances in self.probabilities(space).items():
            drawn = np.zeros(len(chances))
            drawn[list(space[name]).index(architecture[name])] = 1
            self._logits[name] += self._rate * advantage * (drawn - chances)
        known = reward if self._baseline is None else self._baseline
        self._baseline = self._decay * known + (1 - self._decay) * reward

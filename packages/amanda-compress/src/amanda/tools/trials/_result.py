"""Trials of architectures, and those that no other dominates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Trial:
    """One architecture that was evaluated; metric: None if `error` says why it failed."""

    architecture: Mapping[str, str]
    metric: float | None
    costs: Mapping[str, float]
    seconds: float
    error: str = ""

    @property
    def scores(self) -> tuple[float, ...]:
        """Return the metric and the negated costs: larger is better for each; () without a metric."""
        return () if self.metric is None else (self.metric, *(-cost for cost in self.costs.values()))


def dominates(scores: Sequence[float], rivals: Sequence[float]) -> bool:
    """Return True if no score is lower than the rival's, and at least one is higher.

    Args:
        scores: Scores of a trial, larger is better.
        rivals: Those of another trial, in the same order.
    """
    pairs = list(zip(scores, rivals, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


class SearchResult(PlottedResult):
    """The trials of a search, with a mark for those on the Pareto front.

    trials: in the order of evaluation.  metric: its name.  stopped: why the search ended.
    """

    name: ClassVar[str] = "search"

    def __init__(self, trials: Sequence[Trial], metric: str, costs: Sequence[str], stopped: str) -> None:
        self.trials, self.metric, self.costs, self.stopped = tuple(trials), metric, tuple(costs), stopped
        self.title = f"{len(self.trials)} architectures by {', '.join([metric, *self.costs])}"
        number_column = partial(Column, number=True, show="{:.4g}".format)
        self.columns = (  # type: ignore[misc]
            Column("trial", number=True), Column("architecture", show=partial(shortened, width=60)),
            number_column(metric), *map(number_column, self.costs),
            Column("front", show={True: "*", False: ""}.__getitem__),
            number_column("seconds", unit="s"), Column("error", show=partial(shortened, width=36)),
        )  # fmt: skip

    @property
    def front(self) -> list[Trial]:
        """Return the trials that no other trial dominates, the highest metric first; of equals the first."""
        front: dict[tuple[float, ...], Trial] = {}
        scores = [trial.scores for trial in self.trials if trial.scores]
        for trial in self.trials:
            if trial.scores and not any(dominates(rivals, trial.scores) for rivals in scores):
                # The first of several with the same scores stands for all.
                front.setdefault(trial.scores, trial)
        return sorted(front.values(), key=lambda trial: trial.scores, reverse=True)

    @property
    def best(self) -> Trial | None:
        """Return the cheapest trial among those with the highest metric; None without trials."""
        return next(iter(self.front), None)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the trials in the order of evaluation."""
        front = set(map(id, self.front))
        return [
            (number, " ".join(trial.architecture.values()), trial.metric, *trial.costs.values(),
             id(trial) in front, trial.seconds, trial.error)
            for number, trial in enumerate(self.trials)
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Say which ops the labels are of, and why the search ended."""
        names = ", ".join(self.trials[0].architecture) if self.trials else "none"
        return [
            f"Labels are of {names}.",
            f"front: no other architecture is better in {self.metric} and as cheap, or cheaper and as good.",
            *([f"The search ended: {self.stopped}."] if self.stopped else []),
        ]

    def _facts(self) -> Mapping[str, Any]:
        """Return the architectures of the front by op."""
        return {
            "metric": self.metric, "costs": self.costs,
            "front": [{"architecture": dict(trial.architecture), self.metric: trial.metric, **trial.costs}
                      for trial in self.front],
        }  # fmt: skip

    def draw(self, axes: Axes) -> None:
        """Draw the metric of each trial against the first cost, with the front as a line, else by trials."""
        evaluated = [(number, trial) for number, trial in enumerate(self.trials) if trial.metric is not None]
        axes.scatter(
            [_x_position(trial, number) for number, trial in evaluated],
            [trial.metric or 0.0 for _, trial in evaluated],
            s=14, color="gray", label="evaluated",
        )  # fmt: skip
        if self.costs:
            front_points = [(_x_position(trial, 0), trial.metric or 0.0) for trial in reversed(self.front)]
            axes.plot(
                [x for x, _ in front_points],
                [y for _, y in front_points],
                color="black",
                marker="o",
                markersize=4,
                label="front",
            )
        axes.set_xlabel(self.costs[0] if self.costs else "trial")
        axes.set_ylabel(self.metric)
        if evaluated:
            axes.legend(frameon=False)


def _x_position(trial: Trial, number: int) -> float:
    """Return a trial's place on the horizontal axis: its first cost, else its number."""
    return next(iter(trial.costs.values()), float(number))

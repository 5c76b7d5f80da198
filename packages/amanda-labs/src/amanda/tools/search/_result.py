"""Results: the ops with a choice, and the architectures that a search has tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, PlottedResult, Result, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amanda.tools.search._site import Site


class ChoicesResult(Result):
    """The ops with a choice: candidates, and the chosen one."""

    name: ClassVar[str] = "search_choices"
    title = "Choices"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(key, show=partial(shortened, width=36)) for key in ("phase", "type", "module", "source")),
        Column("op"), Column("choice"), Column("candidates"), Column("chosen"), Column("mixture"),
        Column("calls", show="{:,}".format, total=True),
    )  # fmt: skip

    def __init__(self, sites: Sequence[Site]) -> None:
        self._rows = [
            ("forward", one.type, one.module, one.source, one.name, one.decision.name, " ".join(one.labels),
             one.chosen, " ".join(map("{:.3f}".format, one.decision.probabilities().values())),
             one.executions.calls)
            for one in sites
        ]  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the ops in the order in which they were met."""
        return self._rows


@dataclass(frozen=True)
class Trial:
    """One architecture that was evaluated; metric: None where that failed, which `error` tells."""

    architecture: Mapping[str, str]
    metric: float | None
    costs: Mapping[str, float]
    seconds: float
    error: str = ""

    @property
    def scores(self) -> tuple[float, ...]:
        """The metric and the costs, all of which are the better the larger they are."""
        return () if self.metric is None else (self.metric, *(-one for one in self.costs.values()))


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if scores are nowhere lower than others, and somewhere higher."""
    pairs = list(zip(one, other, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


class SearchResult(PlottedResult):
    """The trials of a search, with those of the Pareto front marked.

    trials: in the order of evaluation.  metric: what its number is called.
    """

    name: ClassVar[str] = "search"

    def __init__(self, trials: Sequence[Trial], metric: str, costs: Sequence[str], stopped: str) -> None:
        self.trials, self.metric, self.costs, self.stopped = tuple(trials), metric, tuple(costs), stopped
        self.title = f"{len(self.trials)} architectures by {', '.join([metric, *self.costs])}"
        number = partial(Column, number=True, show="{:.4g}".format)
        self.columns = (  # type: ignore[misc]
            Column("trial", number=True), Column("architecture", show=partial(shortened, width=60)),
            number(metric), *map(number, self.costs), Column("front", show=lambda one: "*" if one else ""),
            number("seconds", unit="s"), Column("error", show=partial(shortened, width=36)),
        )  # fmt: skip

    @property
    def front(self) -> list[Trial]:
        """The trials that no other dominates, the first of equal ones, by falling metric."""
        found: dict[tuple[float, ...], Trial] = {}
        for one in self.trials:
            if one.scores and not any(dominates(two.scores, one.scores) for two in self.trials if two.scores):
                found.setdefault(one.scores, one)
        return sorted(found.values(), key=lambda one: one.scores, reverse=True)

    @property
    def best(self) -> Trial | None:
        """The trial with the highest metric, the cheapest of several; None without any."""
        return next(iter(self.front), None)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the trials in the order of evaluation."""
        front = set(map(id, self.front))
        return [
            (number, " ".join(one.architecture.values()), one.metric, *one.costs.values(), id(one) in front,
             one.seconds, one.error)
            for number, one in enumerate(self.trials)
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Say which ops the labels are of, and why the search ended."""
        names = ", ".join(self.trials[0].architecture) if self.trials else "none"
        return [
            f"Labels are of {names}.",
            f"front: no other architecture is better in {self.metric} and as cheap, or cheaper and as good.",
            *([f"The search ended: {self.stopped}."] if self.stopped else []),
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return the architectures of the front by op."""
        return {
            "metric": self.metric, "costs": self.costs,
            "front": [{"architecture": dict(one.architecture), self.metric: one.metric, **one.costs}
                      for one in self.front],
        }  # fmt: skip

    def draw(self, axes: Axes) -> None:
        """Draw the metric of each trial against the first cost, or the trials, and the front as a line."""
        done = [(number, one) for number, one in enumerate(self.trials) if one.metric is not None]
        axes.scatter(
            [_across(one, number) for number, one in done], [one.metric or 0.0 for _, one in done],
            s=14, color="gray", label="evaluated",
        )  # fmt: skip
        if self.costs:
            line = [(_across(one, 0), one.metric or 0.0) for one in reversed(self.front)]
            axes.plot(
                [x for x, _ in line],
                [y for _, y in line],
                color="black",
                marker="o",
                markersize=4,
                label="front",
            )
        axes.set_xlabel(self.costs[0] if self.costs else "trial")
        axes.set_ylabel(self.metric)
        if done:
            axes.legend(frameon=False)


def _across(trial: Trial, number: int) -> float:
    return next(iter(trial.costs.values()), float(number))

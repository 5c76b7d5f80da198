"""Tools that try a model many times: trials, those that no other dominates, and their progress.

result = SearchResult(trials, "accuracy", ["flops"], "")
print(result.best, result.front)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amanda.action import routine_name
from amanda.errors import AmandaError
from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Progress", "SearchResult", "Trial", "check_number", "dominates"]
T = TypeVar("T")

logger = logging.getLogger("amanda")


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
        """Return the metric and the negated costs: larger is better for each."""
        return () if self.metric is None else (self.metric, *(-cost for cost in self.costs.values()))


def dominates(scores: Sequence[float], rivals: Sequence[float]) -> bool:
    """Return True if no score is lower than the rival's, and at least one is higher."""
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
        number = partial(Column, number=True, show="{:.4g}".format)
        self.columns = (  # type: ignore[misc]
            Column("trial", number=True), Column("architecture", show=partial(shortened, width=60)),
            number(metric), *map(number, self.costs),
            Column("front", show={True: "*", False: ""}.__getitem__),
            number("seconds", unit="s"), Column("error", show=partial(shortened, width=36)),
        )  # fmt: skip

    @property
    def front(self) -> list[Trial]:
        """Return the trials that no other trial dominates, the highest metric first."""
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
        """Draw the metric of each trial against the first cost, or the trials, and the front as a line."""
        evaluated = [(number, trial) for number, trial in enumerate(self.trials) if trial.metric is not None]
        axes.scatter(
            [_x_position(trial, number) for number, trial in evaluated],
            [trial.metric or 0.0 for _, trial in evaluated],
            s=14, color="gray", label="evaluated",
        )  # fmt: skip
        if self.costs:
            line = [(_x_position(trial, 0), trial.metric or 0.0) for trial in reversed(self.front)]
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
        if evaluated:
            axes.legend(frameon=False)


def _x_position(trial: Trial, number: int) -> float:
    """Return a trial's place on the horizontal axis: its first cost, else its number."""
    return next(iter(trial.costs.values()), float(number))


class Progress:
    """Show a bar on a terminal, elsewhere a line for each point."""

    def __init__(self, is_visible: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, soft_wrap=True)
        self._lines = is_visible and not self._console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            console=self._console, transient=True, disable=self._lines or not is_visible,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._count = self._total = 0
        self._description = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # else it would end a line that nobody began
            self._bar.stop()

    def begin(self, total: int, description: str, count: int = 0) -> None:
        """Announce the measurement of a point.  count: points measured before it."""
        self._count, self._total, self._description = count, total, description
        self._bar.update(self._task, description=description, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """Report the outcome of the point."""
        self._bar.update(self._task, completed=self._count + 1)
        if self._lines:
            line = f"{self._count + 1}/{self._total} {self._description}: {outcome}"
            self._console.print(line, highlight=False, markup=False)

    @staticmethod
    def attempt(measure: Callable[[], T], description: str) -> tuple[T | None, str]:
        """Return the value of a function of the user, and ""; or None and its exception, as text.

        The exception is logged with the description.  Errors of Amanda and interrupts reach the caller.
        """
        try:
            return measure(), ""
        except AmandaError:
            raise
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            logger.warning("%s: %s", description, error)
            return None, error


def check_number(value: Any, evaluate: Any, error: type[AmandaError], name: str = "") -> float:
    """Return a number, from the value that a function of the user, `evaluate`, returned.

    Raises an `error` for a value that is not a number, and ValueError for one that is not finite.

    Args:
        name: Of the number, where it has to be finite; "" for a number that may be NaN or infinite.
    """
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as reason:  # torch's own, for several numbers
        raise error(
            f"{routine_name(evaluate)} gave {value!r}; give a number, such as an accuracy"
        ) from reason
    if name and not isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number

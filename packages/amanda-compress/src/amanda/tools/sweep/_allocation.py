"""Assignment of levels to ops under a budget: the multiple-choice knapsack, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.sweep._costs import CostModel
from amanda.tools.sweep._result import Point, Site, SweepError

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEEP = "keep"
"""The label of an op that the tool does not change."""
_MOST_ASSIGNMENTS = 20_000
"""Number of partial assignments beyond which one stays for each of as many equal steps of cost."""


class LevelOutcome(NamedTuple):
    """Saved cost and drop of the metric of a group of ops at one level."""

    level: str
    saved: float
    drop: float


class Assignment(NamedTuple):
    """A level for each group, with the sums of saved costs and of drops."""

    saved: float
    drop: float
    levels: tuple[str, ...]


def pareto_assignments(groups: Sequence[Sequence[LevelOutcome]]) -> list[Assignment]:
    """Return the Pareto front of assignments of a level to each group, in rising order of saved cost.

    An assignment that saves no more than another at no smaller drop is not in the list. The front is exact
    up to 20,000 partial assignments; each further group may lose up to a 20,000th of the largest saving.
    """
    saved, drop = np.zeros(1), np.zeros(1)
    steps = []
    for outcomes in groups:
        saved = np.add.outer(saved, [outcome.saved for outcome in outcomes]).ravel()
        drop = np.add.outer(drop, [outcome.drop for outcome in outcomes]).ravel()
        survivors = _pareto_indices(saved, drop)
        if len(survivors) > _MOST_ASSIGNMENTS:
            # Equal steps of saved cost leave assignments for every budget.
            cells = (saved[survivors] / saved[survivors[-1]] * _MOST_ASSIGNMENTS).astype(int)
            firsts = np.unique(cells, return_index=True)[1]
            survivors = survivors[np.union1d(firsts, len(survivors) - 1)]
        saved, drop = saved[survivors], drop[survivors]
        steps.append((outcomes, *divmod(survivors, len(outcomes))))
    # Backtrack from the whole assignments to the outcome that each group contributes.
    rows = np.arange(len(saved))
    labels: list[list[str]] = []
    for outcomes, parent_rows, outcome_indices in reversed(steps):
        labels.append([outcomes[i].level for i in outcome_indices[rows]])
        rows = parent_rows[rows]
    levels: Iterable[tuple[str, ...]] = zip(*reversed(labels), strict=True) if labels else [()]
    return [
        Assignment(float(s), float(d), chosen_levels)
        for s, d, chosen_levels in zip(saved, drop, levels, strict=True)
    ]


def _pareto_indices(saved: NDArray[Any], drop: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of the Pareto front, in rising order of saved cost."""
    order = np.lexsort((drop, -saved))
    least_drop_before = np.minimum.accumulate(np.concatenate(([np.inf], drop[order])))[:-1]
    indices: NDArray[Any] = order[drop[order] < least_drop_before][::-1]
    return indices


def group_by_weights(weights_by_op: Mapping[str, frozenset[object]]) -> list[list[str]]:
    """Return the names of ops in groups; ops that read a weight in common are in one group."""
    groups: list[tuple[set[object], list[str]]] = []
    for name, weights in weights_by_op.items():
        overlapping = [group for group in groups if group[0] & weights]
        merged = (
            set(weights).union(*(group[0] for group in overlapping)),
            [*(n for group in overlapping for n in group[1]), name],
        )
        groups = [*(group for group in groups if group not in overlapping), merged]
    return [names for _, names in groups]


class Allocation:
    """The measurements of a sweep as outcomes of levels, from which budgets choose.

    sites: the ops.  points: by name and level.  dense: the metric without the tool.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        levels: Sequence[float],
        points: Mapping[tuple[str, Any], Point],
        dense: float,
        cost_model: CostModel,
    ) -> None:
        self._cost_model = cost_model
        holders = {name: frozenset(cost_model.weights(site)) for name, site in sites.items()}
        self._groups = group_by_weights(holders)
        self._outcomes = [[LevelOutcome(KEEP, 0.0, 0.0)] for _ in self._groups]
        self._saved: list[dict[str, float]] = [{KEEP: 0.0} for _ in self._groups]
        for names, outcomes, all_saved in zip(self._groups, self._outcomes, self._saved, strict=True):
            for level in levels:
                group_points = [points[name, level] for name in names]
                saved = cost_model.saved([sites[name] for name in names], level, group_points)
                all_saved[f"{level:g}"] = saved
                if not any(point.error for point in group_points):
                    drop = sum(max(dense - (point.metric or 0.0), 0.0) for point in group_points)
                    outcomes.append(LevelOutcome(f"{level:g}", saved, drop))

    @cached_property
    def _assignments(self) -> list[Assignment]:
        return pareto_assignments(self._outcomes)

    def choose(self, budget: float) -> dict[str, str]:
        """Return a label for each op: the least sum of drops within a budget, a share of the cost."""
        cost_model = self._cost_model
        for assignment in self._assignments:
            # The factor allows for rounding of sums, for a budget that a level meets exactly.
            if cost_model.total - assignment.saved <= budget * cost_model.total * (1 + 1e-9):
                group_levels = zip(self._groups, assignment.levels, strict=True)
                return {name: label for names, label in group_levels for name in names}
        lowest_share = 1 - self._assignments[-1].saved / cost_model.total
        raise SweepError(
            f"a budget is {budget:g}; the harshest levels leave {lowest_share:.3g} of the {cost_model.name}"
        )

    def cost(self, architecture: Mapping[str, str]) -> float:
        """Return the cost of the model at the labels of its ops, from the savings of each op alone."""
        group_savings = zip(self._groups, self._saved, strict=True)
        return self._cost_model.total - sum(saved[architecture[names[0]]] for names, saved in group_savings)

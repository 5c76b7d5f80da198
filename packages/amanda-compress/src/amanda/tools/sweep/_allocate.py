"""Which level each op gets under a budget: the multiple-choice knapsack problem, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._prices import Prices
from amanda.tools.sweep._result import Point, Site

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEEP = "keep"
"""The label of an op that is left as it is."""
_MOST = 20_000
"""Partial answers that are kept; of more, one for each of so many equal steps of cost."""


class Offer(NamedTuple):
    """Saved cost and drop of the metric of a group of ops at one level."""

    level: str
    saved: float
    drop: float


class Answer(NamedTuple):
    """Levels of all groups, in their order, with the sums of what is saved and of drops."""

    saved: float
    drop: float
    levels: tuple[str, ...]


def answers(groups: Sequence[Sequence[Offer]]) -> list[Answer]:
    """Return the best ways to give each group one of its levels: each saves more than those before it.

    A way is left out if another saves as much at no larger drop. The answer is exact while there are at most
    20,000 partial ways; each group beyond may cost up to a 20,000th of what can be saved.
    """
    saved, drop = np.zeros(1), np.zeros(1)
    steps = []
    for offers in groups:
        saved = np.add.outer(saved, [one.saved for one in offers]).ravel()
        drop = np.add.outer(drop, [one.drop for one in offers]).ravel()
        kept = _undominated(saved, drop)
        if len(kept) > _MOST:
            cells = (saved[kept] / saved[kept[-1]] * _MOST).astype(int)
            firsts = np.unique(cells, return_index=True)[1]
            kept = kept[np.union1d(firsts, len(kept) - 1)]
        saved, drop = saved[kept], drop[kept]
        steps.append((offers, *divmod(kept, len(offers))))
    way = np.arange(len(saved))
    labels: list[list[str]] = []
    for offers, before, offer in reversed(steps):
        labels.append([offers[i].level for i in offer[way]])
        way = before[way]
    levels: Iterable[tuple[str, ...]] = zip(*reversed(labels), strict=True) if labels else [()]
    return [Answer(float(s), float(d), one) for s, d, one in zip(saved, drop, levels, strict=True)]


def _undominated(saved: NDArray[Any], drop: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of ways that save more than all ways with as small a drop, in rising order."""
    order = np.lexsort((drop, -saved))
    before = np.minimum.accumulate(np.concatenate(([np.inf], drop[order])))[:-1]
    kept: NDArray[Any] = order[drop[order] < before][::-1]
    return kept


def grouped(holders: Mapping[str, frozenset[object]]) -> list[list[str]]:
    """Return the names of ops in groups, such that ops that read a weight in common are in one."""
    groups: list[tuple[set[object], list[str]]] = []
    for name, own in holders.items():
        met = [one for one in groups if one[0] & own]
        merged = (set(own).union(*(one[0] for one in met)), [*(n for one in met for n in one[1]), name])
        groups = [*(one for one in groups if one not in met), merged]
    return [names for _, names in groups]


class Allocation:
    """The measurements of a sweep as offers of levels, from which budgets choose.

    sites: the ops.  points: by name and level.  dense: the metric without the tool.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        levels: Sequence[float],
        points: Mapping[tuple[str, Any], Point],
        dense: float,
        prices: Prices,
    ) -> None:
        self._prices = prices
        holders = {name: frozenset(prices.weights(site)) for name, site in sites.items()}
        self._groups = grouped(holders)
        self._offers = [[Offer(KEEP, 0.0, 0.0)] for _ in self._groups]
        self._saved: list[dict[str, float]] = [{KEEP: 0.0} for _ in self._groups]
        for names, offers, all_saved in zip(self._groups, self._offers, self._saved, strict=True):
            for level in levels:
                own = [points[name, level] for name in names]
                saved = prices.saved([sites[name] for name in names], level, own)
                all_saved[f"{level:g}"] = saved
                if not any(one.error for one in own):
                    drop = sum(max(dense - (one.metric or 0.0), 0.0) for one in own)
                    offers.append(Offer(f"{level:g}", saved, drop))

    @cached_property
    def _ways(self) -> list[Answer]:
        return answers(self._offers)

    def choose(self, budget: float) -> dict[str, str]:
        """Return the label of each op at which the drops have the least sum within a budget."""
        prices = self._prices
        for way in self._ways:
            if prices.total - way.saved <= budget * prices.total * (1 + 1e-9):
                chosen = zip(self._groups, way.levels, strict=True)
                return {name: label for names, label in chosen for name in names}
        least = 1 - self._ways[-1].saved / prices.total
        raise SweepError(
            f"a budget is {budget:g}; the harshest levels leave {least:.3g} of the {prices.name}"
        )

    def cost(self, architecture: Mapping[str, str]) -> float:
        """Return what the model costs at the labels of its ops, by what each op alone saves."""
        each = zip(self._groups, self._saved, strict=True)
        return self._prices.total - sum(saved[architecture[names[0]]] for names, saved in each)

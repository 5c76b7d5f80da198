"""Which level each op gets under a budget: the multiple-choice knapsack problem, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._prices import Prices
from amanda.tools.sweep._result import Point, Site

KEEP = "keep"
"""The label of an op that is left as it is."""
_MOST = 20_000
"""Partial answers that are kept; of more, one for each of so many equal steps of cost."""


class Offer(NamedTuple):
    """What ops give and lose at a level: the cost that is saved, and how far the metric drops."""

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
    20,000 partial ways, and within a 20,000th of what can be saved beyond.
    """
    kept = [Answer(0.0, 0.0, ())]
    for offers in groups:
        grown = [
            Answer(one.saved + offer.saved, one.drop + offer.drop, (*one.levels, offer.level))
            for one in kept
            for offer in offers
        ]
        kept = _undominated(grown)
        if len(kept) > _MOST:
            step = kept[-1].saved / _MOST
            kept = list({int(one.saved / step): one for one in reversed(kept)}.values())[::-1]
    return kept


def _undominated(every: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = []
    for one in sorted(every, key=lambda one: (-one.saved, one.drop)):
        if not found or one.drop < found[-1].drop:
            found.append(one)
    return found[::-1]


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
        for names, offers in zip(self._groups, self._offers, strict=True):
            for level in levels:
                own = [points[name, level] for name in names]
                if not any(one.error for one in own):
                    drop = sum(max(dense - (one.metric or 0.0), 0.0) for one in own)
                    saved = prices.saved([sites[name] for name in names], level, own)
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
        saved = 0.0
        for names, offers in zip(self._groups, self._offers, strict=True):
            saved += next((one.saved for one in offers if one.level == architecture[names[0]]), 0.0)
        return self._prices.total - saved

"""Costs of an architecture: FLOPs and bytes of each op, by the shares of the candidates that are chosen."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from amanda.errors import AmandaError
from amanda.tools.search._errors import SearchError
from amanda.tools.search._site import Site
from amanda.tools.trials import OpCosts


class Costs(OpCosts):
    """Costs of the ops of a model, of which some are computed by candidates."""

    error: ClassVar[type[AmandaError]] = SearchError

    def flops(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return FLOPs of the forward pass; what an op does besides products, such as a bias, stays."""
        shares, skipped = self._shares(sites, architecture)
        total = 0.0
        for op, cost in self._flops.items():
            share = 0.0 if op in skipped else shares.get(op, (1.0, 1.0))[0]
            total += 2 * cost.macs * share + (cost.flops - 2 * cost.macs) * (share > 0)
        return total

    def size(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return bytes of parameters; one that several ops read counts once, by the largest share."""
        shares, skipped = self._shares(sites, architecture)
        found: dict[Hashable, float] = {}
        for op, sizes in self._sizes.items():
            flops, weight = shares.get(op, (1.0, 1.0))
            for holder, size in sizes.items():
                share = weight if holder == self._weights.get(op) or not flops else 1.0
                left = 0.0 if op in skipped else share * size
                found[holder] = max(found.get(holder, 0.0), left)
        return sum(found.values())

    def _shares(
        self, sites: Sequence[Site], architecture: Mapping[str, str]
    ) -> tuple[dict[int, tuple[float, float]], set[int]]:
        if not self._flops:
            raise SearchError("SearchTool: the costs of ops are not known; call prepare(model, x) first")
        shares: dict[int, tuple[float, float]] = {}
        skipped: set[int] = set()
        for site in sites:
            chosen = site.candidates[architecture[site.decision.name]]
            shares |= dict.fromkeys(site.op_ids, chosen.shares(site))
            if chosen.skips and site.branch:
                skipped |= site.branch
        return shares, skipped

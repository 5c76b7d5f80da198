"""Costs of an architecture: FLOPs and bytes of each op, by the shares of the candidates that are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amanda.tools.search._errors import SearchError
from amanda.tools.search._site import Site
from amanda.tools.sweep import OpCosts


class Costs(OpCosts):
    """Records what each forward op costs, and prices architectures."""

    def flops_of(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return FLOPs of the forward pass; what an op does besides products, such as a bias, stays."""
        return self.flops(*self._shares(sites, architecture))

    def size_of(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return bytes of parameters; one that several ops read counts once, by the largest share."""
        return self.size(*self._shares(sites, architecture))

    def _shares(
        self, sites: Sequence[Site], architecture: Mapping[str, str]
    ) -> tuple[dict[int, tuple[float, float]], set[int]]:
        """Return the shares of products and weights by op id, and the ops that are skipped."""
        if self.is_empty:
            raise SearchError("SearchTool: the costs of ops are not known; call prepare(model, x) first")
        shares: dict[int, tuple[float, float]] = {}
        skipped: set[int] = set()
        for site in sites:
            chosen = site.candidates[architecture[site.decision.name]]
            shares |= dict.fromkeys(site.op_ids, chosen.shares(site))
            if chosen.skips and site.branch:
                skipped |= site.branch
        return shares, skipped

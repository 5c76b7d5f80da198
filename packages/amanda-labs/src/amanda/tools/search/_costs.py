"""Costs of architectures, and the cheapest loss of probability that keeps an architecture within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from sys import float_info
from typing import Any

from amanda.tools.search._candidates import SearchError
from amanda.tools.search._site import Site
from amanda.tools.sweep import OpCosts


class ArchitectureCosts(OpCosts):
    """Records the costs of each forward op, and computes those of architectures."""

    def flops_of(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return FLOPs of the forward pass; candidates scale the FLOPs of products, not of a bias."""
        return self.flops(*self._shares_by_op(sites, architecture))

    def size_of(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return bytes of parameters; a parameter that several ops read counts once, by its largest share."""
        return self.size(*self._shares_by_op(sites, architecture))

    def _shares_by_op(
        self, sites: Sequence[Site], architecture: Mapping[str, str]
    ) -> tuple[dict[int, tuple[float, float]], set[int]]:
        """Return the shares of products and weights by op id, and the ops that are skipped.

        Raises SearchError before the costs of ops are recorded.
        """
        if self.is_empty:
            raise SearchError("SearchTool: the costs of ops are not known; call prepare(model, x) first")
        shares: dict[int, tuple[float, float]] = {}
        skipped: set[int] = set()
        for site in sites:
            candidate = site.candidates[architecture[site.decision.name]]
            # An op that was analysed in several programs has several ids.
            shares |= dict.fromkeys(site.op_ids, candidate.cost_shares(site))
            if candidate.skips:  # with the ops of the residual block's branch
                skipped |= site.branch
        return shares, skipped


Measure = Callable[[Mapping[str, str]], float]


def _log(probability: float) -> float:
    # A softmax of float32 that has decided gives exactly 0 for the others.
    return log(max(probability, float_info.min))


def settle_architecture(
    shares: Mapping[str, Mapping[str, float]],
    architecture: Mapping[str, str],
    limits: Mapping[Any, float],
    measures: Mapping[str, Measure],
) -> dict[str, str]:
    """Return an architecture of the most probable candidates, with cheaper ones where limits need them.

    shares: probabilities of candidates by op.  limits: by the names of measures; no change breaks an earlier
    limit.  Each change loses the least log probability for each unit of cost that it saves.
    Raises SearchError if no change saves any more.
    """
    # The most probable candidates first; only as far as limits ask for it are they given up.
    most_probable = {
        name: max(probabilities, key=probabilities.__getitem__) for name, probabilities in shares.items()
    }
    settled = {**architecture, **most_probable}
    earlier_limits: list[tuple[Measure, float]] = []
    for cost, limit in limits.items():
        measure = measures[cost]
        while (present_cost := measure(settled)) > limit:
            # Greedy, one change after the other, as all combinations are too many to try.
            changes = []  # loss for each unit saved, name, label
            for name, probabilities in shares.items():
                for label, probability in probabilities.items():
                    changed_architecture = settled | {name: label}
                    saving = present_cost - measure(changed_architecture)
                    breaks_limit = any(
                        earlier_measure(changed_architecture) > bound
                        for earlier_measure, bound in earlier_limits
                    )
                    if saving > 0 and not breaks_limit:
                        loss = _log(probabilities[settled[name]]) - _log(probability)
                        changes.append((loss / saving, name, label))
            if not changes:
                raise SearchError(f"SearchTool.settle: {cost} are {present_cost:g} at least, above {limit:g}")
            _, changed_name, cheaper_label = min(changes)
            settled[changed_name] = cheaper_label
        earlier_limits.append((measure, limit))
    return settled

"""Decisions of an architecture, the costs of an architecture, and the settling of mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any
from zlib import crc32

from amanda.tools.libraries import numpy as np
from amanda.tools.search._candidates import SearchError
from amanda.tools.sweep import OpCosts

if TYPE_CHECKING:
    from amanda.tools.search._libraries import Library
    from amanda.tools.search._site import Site

_SPREAD = 1e-3
"""Standard deviation of the mixture weights at the start, as in the code of Liu et al. 2019."""


class Decision:
    """A decision of an architecture: a label for an op, or for all ops that share a choice.

    name: in architectures.  sites: its ops.  labels: those that each of its ops can have.
    label: the current one.  rejected: reasons of rejected candidates, by label.
    """

    def __init__(self, name: str, is_shared: bool) -> None:
        self.name, self.is_shared = name, is_shared
        self.sites: list[Site] = []
        self.labels: tuple[str, ...] = ()
        self.label = ""
        self.rejected: dict[str, str] = {}
        self._mixture_labels: tuple[str, ...] = ()
        """The labels of the mixture weights; a later op may have rejected some of them."""

    def admit(self, site: Site) -> bool:
        """Add an op, and drop the labels that it cannot have; return False if fewer than two remain."""
        labels = [label for label in self.labels or site.candidates if label in site.candidates]
        if len(labels) < 2:
            return False
        prefix = f"{site.name} cannot have it: " if self.is_shared else ""
        for label, reason in site.rejected.items():
            self.rejected.setdefault(label, f"{prefix}{reason}")
        self.sites.append(site)
        self.labels = tuple(labels)
        if self.label not in labels:
            self.label = labels[0]
        return True

    def check(self, label: Any) -> None:
        """Raise SearchError for a label that the decision does not have."""
        if label not in self.labels:
            reason = f", since {self.rejected[label]}" if label in self.rejected else ""
            explanation = f"{reason}; it has {', '.join(self.labels)}"
            raise SearchError(f"SearchTool: {label!r} is no candidate of {self.name}{explanation}")

    def start_mixture(self, seed: int) -> None:
        """Create the mixture weights, as state of the first op."""
        if not self._mixture_labels:
            self._mixture_labels = self.labels
            numbers = np.random.default_rng([seed, crc32(self.name.encode())])
            start = _SPREAD * numbers.standard_normal(len(self.labels))
            self.sites[0].keep_state("alpha", lambda: start, True)

    @property
    def alpha(self) -> Any:
        """The mixture weights ahead of softmax; None if there are none."""
        return self.sites[0].state("alpha") if self._mixture_labels else None

    def mixture_shares(self, like: Any, library: Library) -> Mapping[str, Any]:
        """Return softmax of the mixture weights, in the element type of a tensor, by label."""
        alpha = self.sites[0].read("alpha", like, library)
        if self._mixture_labels != self.labels:  # -inf gives a label that was dropped the share 0
            mask = np.array(
                [0.0 if label in self.labels else -np.inf for label in self._mixture_labels], np.float32
            )
            alpha = alpha + library.cast(mask, like)
        shares = library.softmax(alpha)
        return {label: shares[self._mixture_labels.index(label)] for label in self.labels}

    def probabilities(self) -> dict[str, float]:
        """Return softmax of the mixture weights as numbers, by label; an empty dict if there are none."""
        if not self._mixture_labels:
            return {}
        alpha = self.sites[0].array("alpha")[[self._mixture_labels.index(label) for label in self.labels]]
        exponents = np.exp(alpha - alpha.max())
        return dict(zip(self.labels, map(float, exponents / exponents.sum()), strict=True))


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
        """Return the shares of products and weights by op id, and the ops that are skipped."""
        if self.is_empty:
            raise SearchError("SearchTool: the costs of ops are not known; call prepare(model, x) first")
        shares: dict[int, tuple[float, float]] = {}
        skipped: set[int] = set()
        for site in sites:
            candidate = site.candidates[architecture[site.decision.name]]
            shares |= dict.fromkeys(site.op_ids, candidate.cost_shares(site))
            if candidate.skips and site.branch:
                skipped |= site.branch
        return shares, skipped


Measure = Callable[[Mapping[str, str]], float]


def settle_architecture(
    shares: Mapping[str, Mapping[str, float]],
    architecture: Mapping[str, str],
    limits: Mapping[Any, float],
    measures: Mapping[str, Measure],
) -> dict[str, str]:
    """Return an architecture of the most probable candidates, with cheaper ones where limits need them.

    shares: probabilities of candidates.  limits: by the names of measures; no change breaks an earlier limit.
    Each change loses the least log probability for each unit of cost that it saves.  Raises SearchError if no
    change saves any more.
    """
    settled = {
        **architecture,
        **{name: max(probabilities, key=probabilities.__getitem__) for name, probabilities in shares.items()},
    }
    earlier_limits: list[tuple[Measure, float]] = []
    for cost, limit in limits.items():
        measure = measures[cost]
        while (cost_now := measure(settled)) > limit:
            steps = []
            for name, probabilities in shares.items():
                for label, share in probabilities.items():
                    cheaper = settled | {name: label}
                    saved = cost_now - measure(cheaper)
                    if saved > 0 and all(
                        earlier_measure(cheaper) <= bound for earlier_measure, bound in earlier_limits
                    ):
                        steps.append((log(probabilities[settled[name]] / share) / saved, name, label))
            if not steps:
                raise SearchError(f"SearchTool.settle: {cost} are {cost_now:g} at least, above {limit:g}")
            settled |= [min(steps)[1:]]
        earlier_limits.append((measure, limit))
    return settled

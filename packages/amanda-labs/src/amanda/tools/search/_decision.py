"""One decision of an architecture, of an op alone or of all ops that share a choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

from amanda.tools.libraries import numpy as np
from amanda.tools.search._errors import SearchError

if TYPE_CHECKING:
    from amanda.tools.search._libraries import Library
    from amanda.tools.search._site import Site

_SPREAD = 1e-3
"""Standard deviation of the mixture weights at the start, as in the code of Liu et al. 2019."""


class Decision:
    """A label that is chosen among those that each op of the decision can have.

    name: by which architectures know it.  sites: its ops.  left: by label, why a candidate was left out.
    """

    def __init__(self, name: str, is_shared: bool) -> None:
        self.name, self.is_shared = name, is_shared
        self.sites: list[Site] = []
        self.labels: tuple[str, ...] = ()
        self.chosen = ""
        self.left: dict[str, str] = {}
        self._mixed: tuple[str, ...] = ()
        """The labels that the mixture weights are of, some of which a later op may not have."""

    def admit(self, site: Site) -> bool:
        """Add an op, without the labels that it cannot have; return False if fewer than two would be left."""
        labels = [label for label in self.labels or site.candidates if label in site.candidates]
        if len(labels) < 2:
            return False
        told = f"{site.name} cannot have it: " if self.is_shared else ""
        for label, reason in site.left.items():
            self.left.setdefault(label, f"{told}{reason}")
        self.sites.append(site)
        self.labels = tuple(labels)
        if self.chosen not in labels:
            self.chosen = labels[0]
        return True

    def check(self, label: Any) -> None:
        """Raise SearchError for a label that is none of the decision."""
        if label not in self.labels:
            reason = f", since {self.left[label]}" if label in self.left else ""
            told = f"{reason}; it has {', '.join(self.labels)}"
            raise SearchError(f"SearchTool: {label!r} is no candidate of {self.name}{told}")

    def keep_mixture(self, seed: int) -> None:
        """Make the mixture weights, as state of the first op."""
        if not self._mixed:
            self._mixed = self.labels
            numbers = np.random.default_rng([seed, crc32(self.name.encode())])
            start = _SPREAD * numbers.standard_normal(len(self.labels))
            self.sites[0].keep("alpha", lambda: start, True)

    @property
    def alpha(self) -> Any:
        """The mixture weights ahead of softmax; None without."""
        return self.sites[0].state("alpha") if self._mixed else None

    def shares(self, like: Any, library: Library) -> Mapping[str, Any]:
        """Return softmax of the mixture weights, in the element type of a tensor, by label."""
        alpha = self.sites[0].read("alpha", like, library)
        if self._mixed != self.labels:
            gone = np.array([0.0 if one in self.labels else -np.inf for one in self._mixed], np.float32)
            alpha = alpha + library.cast(gone, like)
        shares = library.softmax(alpha)
        return {label: shares[self._mixed.index(label)] for label in self.labels}

    def probabilities(self) -> dict[str, float]:
        """Return softmax of the mixture weights as numbers, by label; nothing without them."""
        if not self._mixed:
            return {}
        alpha = self.sites[0].array("alpha")[[self._mixed.index(label) for label in self.labels]]
        exponents = np.exp(alpha - alpha.max())
        return dict(zip(self.labels, map(float, exponents / exponents.sum()), strict=True))

"""The patterns by name, for weights (outputs, inputs, ...)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from autoray import do, shape

from amanda.tools.kit._tensors import Array
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._masks import channels_kept, elements_kept, n_m_kept, tiles_kept


class Pattern(ABC):
    """Which elements are dropped together."""

    @abstractmethod
    def kept(self, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
        """Return True for kept elements of weights (outputs, inputs, ...); magnitudes: -1 if dropped."""

    def misfit(self, extents: Sequence[int], has_axes: bool) -> str | None:
        """Why a weight of these extents cannot have the pattern; None where it can."""
        return None if has_axes else "which of its axes are outputs and inputs is not known"


class Elements(Pattern):
    """Each element for itself."""

    def kept(self, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
        """The largest of all."""
        return elements_kept(magnitudes, sparsity)

    def misfit(self, extents: Sequence[int], has_axes: bool) -> None:
        """Every weight can."""


@dataclass(frozen=True)
class Vectors(Pattern):
    """n of each m consecutive input channels, for each output and each place in the kernel."""

    n: int
    m: int

    def kept(self, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
        """The largest of each m."""
        return [self._of(one) for one in magnitudes]

    def _of(self, magnitudes: Array) -> Array:
        return do("moveaxis", n_m_kept(do("moveaxis", magnitudes, 1, -1), self.n, self.m), -1, 1)

    def misfit(self, extents: Sequence[int], has_axes: bool) -> str | None:
        """One whose input channels are no multiple of m cannot."""
        if has_axes and extents[1] % self.m:
            return f"its {extents[1]} input channels are no multiple of {self.m}"
        return super().misfit(extents, has_axes)


@dataclass(frozen=True)
class Tiles(Pattern):
    """Columns, and rows of tiles, of the matrix (inputs and kernel, outputs) that a product has."""

    granularity: int

    def kept(self, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
        """The rows with the largest root mean squares of the columns with the largest."""
        matrices = [do("reshape", one, (shape(one)[0], -1)).T for one in magnitudes]
        found = tiles_kept(matrices, sparsity, self.granularity)
        return [do("reshape", kept.T, shape(one)) for kept, one in zip(found, magnitudes, strict=True)]


@dataclass(frozen=True)
class Channels(Pattern):
    """Whole filters: output channels."""

    norm: int

    def kept(self, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
        """Those of the largest norms."""
        return channels_kept(magnitudes, sparsity, self.norm)


def pattern_of(name: str, granularity: int, norm: int) -> Pattern:
    """The pattern of a name: "element", "2:4" and its like, "tile", "channel".

    Raises PruneError for another.
    """
    if vectors := re.fullmatch(r"(\d+):(\d+)", str(name)):
        n, m = int(vectors[1]), int(vectors[2])
        if 0 < n <= m:
            return Vectors(n, m)
        raise PruneError(f"pattern is {name!r}: of each {m} channels {n} cannot be kept")
    if granularity < 1 or norm not in (1, 2):
        raise PruneError(f"granularity is {granularity} and norm {norm}; give 1 or more columns, and 1 or 2")
    named: dict[str, Pattern] = {
        "element": Elements(), "tile": Tiles(granularity), "channel": Channels(norm)
    }  # fmt: skip
    if name not in named:
        raise PruneError(f"pattern is {name!r}; it is element, n:m (such as 2:4), tile or channel")
    return named[name]

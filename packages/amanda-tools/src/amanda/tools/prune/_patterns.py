"""The patterns by name, for weights (outputs, inputs, ...)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from amanda.tools._libraries import do, shape
from amanda.tools.kit._tensors import Array
from amanda.tools.prune._masks import PruneError, channels_kept, elements_kept, n_m_kept, tiles_kept


@dataclass(frozen=True)
class Pattern:
    """The elements that are dropped together.

    name: as the user gives it.  kept: returns what is kept of weights (outputs, inputs, ...) at a sparsity,
    by magnitudes, which are -1 where an element is dropped already.
    vectors: n and m where n of each m consecutive input channels are kept, whatever the sparsity.
    """

    name: str
    kept: Callable[[Sequence[Array], float], list[Array]]
    vectors: tuple[int, int] | None = None

    @property
    def is_elementwise(self) -> bool:
        """True if each element is dropped by itself."""
        return self.kept is elements_kept

    def misfit(self, extents: Sequence[int], has_axes: bool) -> str | None:
        """Return why a weight of these extents cannot have the pattern; None where it can."""
        if not has_axes and not self.is_elementwise:
            return "which of its axes are outputs and inputs is not known"
        if self.vectors is not None and extents[1] % self.vectors[1]:
            return f"its {extents[1]} input channels are no multiple of {self.vectors[1]}"
        return None


def pattern_of(name: str, granularity: int, norm: int) -> Pattern:
    """Return the pattern of a name: "element", "2:4" and its like, "tile", "channel".

    Raises PruneError for another.
    """
    if vectors := re.fullmatch(r"(\d+):(\d+)", str(name)):
        n, m = int(vectors[1]), int(vectors[2])
        if 0 < n <= m:
            return Pattern(name, partial(_vectors_kept, n, m), (n, m))
        raise PruneError(f"pattern is {name!r}: of each {m} channels {n} cannot be kept")
    if granularity < 1 or norm not in (1, 2):
        raise PruneError(f"granularity is {granularity} and norm {norm}; give 1 or more columns, and 1 or 2")
    named: dict[str, Callable[..., list[Array]]] = {
        "element": elements_kept,
        "tile": partial(_tiles_kept, granularity),
        "channel": partial(channels_kept, norm=norm),
    }
    if name not in named:
        raise PruneError(f"pattern is {name!r}; it is element, n:m (such as 2:4), tile or channel")
    return Pattern(name, named[name])


def _vectors_kept(n: int, m: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    return [do("moveaxis", n_m_kept(do("moveaxis", one, 1, -1), n, m), -1, 1) for one in magnitudes]


def _tiles_kept(granularity: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return what is kept of the matrices (inputs and window, outputs) that products have."""
    matrices = [do("reshape", one, (shape(one)[0], -1)).T for one in magnitudes]
    found = tiles_kept(matrices, sparsity, granularity)
    return [do("reshape", kept.T, shape(one)) for kept, one in zip(found, magnitudes, strict=True)]

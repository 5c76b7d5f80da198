"""The patterns by name, for weights (outputs, inputs, ...)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from amanda.tools.libraries import do, shape
from amanda.tools.prune._arrays import Array
from amanda.tools.prune._masks import (
    PruneError,
    blocks_kept,
    channels_kept,
    elements_kept,
    n_m_kept,
    tiles_kept,
)


@dataclass(frozen=True)
class Pattern:
    """The elements that are dropped together.

    name: as the user gives it.  kept: returns what is kept of weights (outputs, inputs, ...) at a sparsity,
    by scores, which are -inf where an element is dropped already.
    vectors: n and m where n of each m consecutive input channels are kept, whatever the sparsity.
    block: outputs and inputs of a block, by which a weight's matrix (outputs, inputs and window) is divided.
    """

    name: str
    kept: Callable[[Sequence[Array], float], list[Array]]
    vectors: tuple[int, int] | None = None
    block: tuple[int, int] | None = None

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
        if self.block is not None:
            matrix = extents[0], prod(extents[1:])
            if any(extent % own for extent, own in zip(matrix, self.block, strict=True)):
                return f"its matrix of {matrix[0]}x{matrix[1]} has no whole number of blocks {self.block}"
        return None


def pattern_of(name: str, granularity: int, norm: int, block: tuple[int, int]) -> Pattern:
    """Return the pattern of a name: "unstructured", "2:4" and its like, "block", "tile", "structured".

    Raises PruneError for another.
    """
    if vectors := re.fullmatch(r"(\d+):(\d+)", name):
        n, m = int(vectors[1]), int(vectors[2])
        if 0 < n <= m:
            return Pattern(name, partial(_vectors_kept, n, m), (n, m))
        raise PruneError(f"pattern is {name!r}: of each {m} channels {n} cannot be kept")
    named: dict[str, Callable[..., list[Array]]] = {
        "unstructured": elements_kept,
        "block": partial(_blocks_kept, block, norm),
        "tile": partial(_tiles_kept, granularity),
        "structured": partial(channels_kept, norm=norm),
    }
    if name not in named:
        raise PruneError(
            f"pattern is {name!r}; it is unstructured, n:m (such as 2:4), block, tile or structured"
        )
    return Pattern(name, named[name], block=(block[0], block[1]) if name == "block" else None)


def _vectors_kept(n: int, m: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    return [do("moveaxis", n_m_kept(do("moveaxis", one, 1, -1), n, m), -1, 1) for one in magnitudes]


def _blocks_kept(
    block: tuple[int, int], norm: int, magnitudes: Sequence[Array], sparsity: float
) -> list[Array]:
    """Return what is kept of the matrices (outputs, inputs and window)."""
    matrices = [do("reshape", one, (shape(one)[0], -1)) for one in magnitudes]
    found = blocks_kept(matrices, sparsity, block, norm)
    return [do("reshape", kept, shape(one)) for kept, one in zip(found, magnitudes, strict=True)]


def _tiles_kept(granularity: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return what is kept of the matrices (inputs and window, outputs) that products have."""
    matrices = [do("reshape", one, (shape(one)[0], -1)).T for one in magnitudes]
    found = tiles_kept(matrices, sparsity, granularity)
    return [do("reshape", kept.T, shape(one)) for kept, one in zip(found, magnitudes, strict=True)]

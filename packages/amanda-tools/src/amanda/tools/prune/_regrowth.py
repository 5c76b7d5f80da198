"""Weights that come back: as many as are dropped beyond what the sparsity asks for."""

from __future__ import annotations

from collections.abc import Sequence

from autoray import do

from amanda.tools.kit import tensors_of
from amanda.tools.kit._tensors import Array
from amanda.tools.prune._masks import size, split


def regrown_kept(
    magnitudes: Sequence[Array], growth: Sequence[Array], sparsity: float, fraction: float
) -> list[Array]:
    """Return True for kept elements; the smallest are exchanged for those of the highest growth scores.

    magnitudes: -1 where a weight is dropped already.  growth: magnitudes of gradients (RigL) or random
    numbers (SET), not negative.  Of what the sparsity lets be kept, the share `fraction` is exchanged.
    Source: Mocanu et al. 2018 (SET); Evci et al. 2020 (RigL), algorithm 1.
    """
    tensors = tensors_of(magnitudes[0])
    row, scores = tensors.flat(magnitudes), tensors.flat(growth)
    total = size(row)
    kept = total - round(sparsity * total)
    stay = min(kept - round(fraction * kept), int((row >= 0).sum()))
    staying = tensors.drop_lowest(row, total - stay)
    candidates = do("where", staying, -do("ones_like", scores), scores)
    grown = tensors.drop_lowest(candidates, total - (kept - stay))
    return split(staying | grown, magnitudes)

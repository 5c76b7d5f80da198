"""Weights that come back: as many as are dropped beyond what the sparsity asks for."""

from __future__ import annotations

from collections.abc import Sequence

from autoray import do

from amanda.tools.prune._framework import Array, framework_of
from amanda.tools.prune._masks import size, split


def regrown_kept(
    magnitudes: Sequence[Array], growth: Sequence[Array], sparsity: float, fraction: float
) -> list[Array]:
    """What is kept of weights when the smallest are exchanged for those of the highest growth scores.

    magnitudes: -1 where a weight is dropped already.  growth: magnitudes of gradients (RigL) or random
    numbers (SET), not negative.  Of what the sparsity lets be kept, the share `fraction` is exchanged.
    Source: Mocanu et al. 2018 (SET); Evci et al. 2020 (RigL), algorithm 1.
    """
    framework = framework_of(magnitudes[0])
    row, scores = framework.row(magnitudes), framework.row(growth)
    total = size(row)
    kept = total - round(sparsity * total)
    stay = min(kept - round(fraction * kept), int((row >= 0).sum()))
    staying = framework.lowest_dropped(row, total - stay)
    candidates = do("where", staying, -do("ones_like", scores), scores)
    grown = framework.lowest_dropped(candidates, total - (kept - stay))
    return split(staying | grown, magnitudes)

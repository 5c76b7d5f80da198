"""Pruning of weights (unstructured, N:M, block, tile, structured) on a schedule, and removal of channels.

prune = PruneTool(sparsity=0.9, pattern="unstructured", schedule="cubic", end=1000, frequency=100)
with amanda.apply(prune):
    train(model)
prune.finalize(model)
print(prune.result)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda.tools.prune._masks import (
    PruneError,
    ShapeError,
    block_mask,
    channel_mask,
    element_mask,
    input_permutation,
    n_m_mask,
    tile_mask,
)
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._tool import PruneTool, cubic_sparsity, linear_sparsity

if TYPE_CHECKING:
    from amanda.tools.prune.channels import ChannelPruneResult, ChannelPruneTool

__all__ = [
    "ChannelPruneResult", "ChannelPruneTool", "PruneError", "PruneResult", "PruneTool", "ShapeError",
    "block_mask", "channel_mask", "cubic_sparsity", "element_mask", "input_permutation", "linear_sparsity",
    "n_m_mask", "tile_mask",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the removal of channels when one of its names is first used."""
    if name not in ("ChannelPruneResult", "ChannelPruneTool"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amanda.tools.prune import channels

    return getattr(channels, name)

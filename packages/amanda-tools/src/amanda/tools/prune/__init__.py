"""Pruning of weights: by element, N:M, tile or channel, at once or by a schedule; removal of channels.

prune = PruneTool(sparsity=0.9, pattern="element", schedule="cubic", end=1000, frequency=100)
with amanda.apply(prune):
    train(model)
prune.finalize(model)
print(prune.result)
"""

from amanda.tools.prune._masks import PruneError, ShapeError, channel_mask, element_mask, n_m_mask, tile_mask
from amanda.tools.prune._permutation import input_permutation
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._schedule import cubic_sparsity
from amanda.tools.prune._tool import PruneTool
from amanda.tools.prune.channels import ChannelPruneResult, ChannelPruneTool

__all__ = [
    "ChannelPruneResult", "ChannelPruneTool", "PruneError", "PruneResult", "PruneTool", "ShapeError",
    "channel_mask", "cubic_sparsity", "element_mask", "input_permutation", "n_m_mask", "tile_mask",
]  # fmt: skip

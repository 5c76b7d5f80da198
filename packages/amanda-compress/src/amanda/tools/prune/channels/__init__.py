"""Pruning of channels in PyTorch, Keras and ONNX, with all layers that depend on them, for smaller models.

prune = ChannelPruneTool(sparsity=0.5, round_to=8)
prune.prepare(model, images)
with amanda.apply(prune):
    train(model)
prune.finalize(model, remove=True)
"""

from amanda.tools.prune.channels._tool import ChannelPruneResult, ChannelPruneTool

__all__ = ["ChannelPruneResult", "ChannelPruneTool"]

"""Pruning of channels in PyTorch, Keras and ONNX, with all layers that depend on them, for smaller models.

prune = ChannelPruneTool(sparsity=0.5, round_to=8)
prune.prepare(model, images)
with amanda.apply(prune):
    train(model)
prune.finalize(model, remove=True)

A tool that scales or removes channels derives from `ModuleTracing`, and gives a rule for each type of op
that it passes: a function of a `FollowedOp` that returns the labels of the channels of the op's outputs.
"""

from amanda.tools.prune.channels._labels import Families, Family, FollowedOp, Work, shaped, varying
from amanda.tools.prune.channels._pytorch import ModuleTracing, TorchModel
from amanda.tools.prune.channels._removal import extents_of, size_attributes
from amanda.tools.prune.channels._rules import Rule, concatenated, convolution, fresh, linear, same_channels
from amanda.tools.prune.channels._tool import ChannelPruneResult, ChannelPruneTool

__all__ = [
    "ChannelPruneResult", "ChannelPruneTool", "Families", "Family", "FollowedOp", "ModuleTracing", "Rule",
    "TorchModel", "Work", "concatenated", "convolution", "extents_of", "fresh", "linear", "same_channels",
    "shaped", "size_attributes", "varying",
]  # fmt: skip

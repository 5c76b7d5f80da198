"""Pruning of channels in PyTorch, Keras and ONNX, with all layers that depend on them, for smaller models.

prune = ChannelPruneTool(sparsity=0.5, round_to=8)
prune.prepare(model, images)
with amanda.apply(prune):
    train(model)
prune.finalize(model, remove=True)

A tool that scales or removes channels derives from `ModuleTracing`, and gives a rule for each type of op
that it passes: a function of a `Call` that returns the labels of the channels of the op's outputs.
"""

from amanda.tools.prune.channels._labels import Call, Families, Family, Work, shaped, varying
from amanda.tools.prune.channels._pytorch import Module, ModuleTracing
from amanda.tools.prune.channels._rules import Rule, concatenated, convolution, fresh, linear, same_channels
from amanda.tools.prune.channels._tool import ChannelPruneResult, ChannelPruneTool

__all__ = [
    "Call", "ChannelPruneResult", "ChannelPruneTool", "Families", "Family", "Module", "ModuleTracing", "Rule",
    "Work", "concatenated", "convolution", "fresh", "linear", "same_channels", "shaped", "varying",
]  # fmt: skip

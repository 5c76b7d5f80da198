"""Channels followed through a call of a PyTorch model: which of them belong to the same parameters.

A tool that scales or removes channels derives from `ModuleTracing`, and gives a rule for each type of op that
it passes: a function of a `Call` that returns the labels of the channels of the op's outputs.
"""

from amanda.tools.prune.channels._labels import Call, Families, Family, Work, shaped, varying
from amanda.tools.prune.channels._layers import convolution, linear
from amanda.tools.prune.channels._pytorch import Module, ModuleTracing
from amanda.tools.prune.channels._rules import Rule, concatenated, fresh, same_channels

__all__ = [
    "Call", "Families", "Family", "Module", "ModuleTracing", "Rule", "Work", "concatenated", "convolution",
    "fresh", "linear", "same_channels", "shaped", "varying",
]  # fmt: skip

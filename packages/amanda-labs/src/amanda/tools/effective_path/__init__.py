"""Effective paths: the neurons, synapses and weights that made a model's output.

tool = EffectivePathTool(theta=0.5)
with amanda.apply(tool):
    model(images)
path, *_ = tool.paths()
print(tool.result)
"""

from amanda.tools.effective_path._path import EffectivePath, EffectivePathResult, Layer, PathError, union
from amanda.tools.effective_path._rules import Rule, Step, Terms, leading
from amanda.tools.effective_path._tool import EffectivePathTool

__all__ = [
    "EffectivePath",
    "EffectivePathResult",
    "EffectivePathTool",
    "Layer",
    "PathError",
    "Rule",
    "Step",
    "Terms",
    "leading",
    "union",
]

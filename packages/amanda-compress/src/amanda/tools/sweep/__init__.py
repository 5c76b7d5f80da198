"""Sweeps: measure a metric while one op at a time, or all together, are pruned or quantised.

sweep = SparsitySweep(lambda: accuracy(model, images, labels), sparsities=[0.5, 0.8, 0.9])
print(sweep.run())
sweep.result.save("sensitivity.svg")
"""

from amanda.tools.sweep._allocation import OpCosts, WeightSize
from amanda.tools.sweep._command import command
from amanda.tools.sweep._result import ALL, Point, Site, SweepError, SweepResult
from amanda.tools.sweep._sweep import BitsSweep, SparsitySweep, Sweep

__all__ = [
    "ALL",
    "BitsSweep",
    "OpCosts",
    "Point",
    "Site",
    "SparsitySweep",
    "Sweep",
    "SweepError",
    "SweepResult",
    "WeightSize",
    "command",
]

"""Sweeps: what a metric is when one op alone, or all of them, are pruned or quantised more and more.

sweep = SparsitySweep(lambda: accuracy(model, images, labels), sparsities=[0.5, 0.8, 0.9])
print(sweep.run())
sweep.result.save("sensitivity.svg")
"""

from amanda.tools.sweep._command import command
from amanda.tools.sweep._costs import OpCosts, WeightSize
from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._kinds import BitsSweep, SparsitySweep
from amanda.tools.sweep._result import ALL, Point, Site, SweepResult
from amanda.tools.sweep._sweep import Sweep

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

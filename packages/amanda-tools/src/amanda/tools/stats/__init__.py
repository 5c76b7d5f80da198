"""Statistics of weights, activations and gradients, op by op, measured as they stream by.

stats = StatsTool(quantiles=[0.5, 0.999], every=10)
with amanda.apply(stats):
    for batch in batches:
        model(batch).sum().backward()
print(stats.result)
"""

from amanda.tools.stats._accumulator import Accumulator, numbers
from amanda.tools.stats._statistics import Bins, Sketch, Statistics
from amanda.tools.stats._tool import Measured, StatsResult, StatsTool

__all__ = ["Accumulator", "Bins", "Measured", "Sketch", "Statistics", "StatsResult", "StatsTool", "numbers"]

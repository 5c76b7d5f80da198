"""FLOPs, MACs, parameters and memory traffic of what a scope executes, op by op.

flops = FlopsTool()
with amanda.apply(flops):
    model(x).sum().backward()
print(flops.result.by("module"))
"""

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._effective import Effective, EffectiveResult, effective
from amanda.tools.flops._result import FlopsResult, OpCost
from amanda.tools.flops._tool import FlopsTool

__all__ = [
    "Cost",
    "Effective",
    "EffectiveResult",
    "FlopsResult",
    "FlopsTool",
    "Formula",
    "OpCost",
    "Shapes",
    "effective",
]

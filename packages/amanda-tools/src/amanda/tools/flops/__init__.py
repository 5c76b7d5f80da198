"""FLOPs, MACs, parameters and memory traffic of what a scope executes, op by op.

print(count_flops(model, x).total())
print(summary(model, x, depth=2))

flops = FlopsTool()
with amanda.apply(flops):
    model(x).sum().backward()
print(flops.result)
"""

from __future__ import annotations

from typing import Any

from amanda.plugins import import_from
from amanda.tools.flops._cost import Cost, FlopsResult, Formula, OpCost, Shapes
from amanda.tools.flops._tool import FlopsTool, count_flops, summary

__all__ = [
    "Cost", "FlopsResult", "FlopsTool", "Formula", "OpCost", "Shapes", "count_flops", "summary",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a name of `amanda.tools.effective_flops`, which belongs to the tools that change weights."""
    if name not in ("Effective", "EffectiveResult", "effective"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_from("amanda.tools.effective_flops", name)

"""FLOPs, MACs, parameters and memory traffic of what a scope executes, op by op.

flops = FlopsTool()
with amanda.apply(flops):
    model(x).sum().backward()
print(flops.result.by("module"))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._result import FlopsResult, OpCost
from amanda.tools.flops._tool import FlopsTool

__all__ = [
    "Cost",
    "FlopsResult",
    "FlopsTool",
    "Formula",
    "OpCost",
    "Shapes",
]

_EFFECTIVE = "amanda.tools.effective_flops"


def __getattr__(name: str) -> Any:
    """Import a name that had its place here from its distribution, which stands on this one."""
    if name not in ("Effective", "EffectiveResult", "effective"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_EFFECTIVE), name)
    except ModuleNotFoundError as error:
        if error.name != _EFFECTIVE:
            raise
        raise ImportError(f"{name} is in {_EFFECTIVE}: pip install amanda-compress") from error

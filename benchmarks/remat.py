"""Cost of training within a budget of memory: time of a step over the bare one, and ops that ran again."""

from typing import Any

from _measure import BARE, QUICK, controls, pin_to_one_core, progress, steps_in_turns
from _models import models, training
from _tools import scopes

import amanda
from amanda.tools.remat import RematTool

MODELS = ("ResNet-50", "BERT-base")
SHARES = (0.75, 0.5, 0.4)


def benchmark() -> dict[str, Any]:
    """Return, by model, "seconds" of steps by share of the memory that it needs, and what "came" of each."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name in MODELS[: 1 if QUICK else None]:
        progress(f"  {name}")
        pair = models()[name]
        step = training(*pair.usual())
        free = RematTool()
        with amanda.apply(free):
            step()
        peak = free.result.peak
        tools = {"no budget": RematTool()}
        tools |= {f"{100 * share:.0f} %": RematTool(int(share * peak)) for share in SHARES}
        under = controls() | scopes({title: lambda tool=tool: tool for title, tool in tools.items()})
        seconds = steps_in_turns(step, under, 10, 4)
        rounds = len(seconds[BARE]) + (not QUICK)  # with the one that warms up
        came = {
            title: {"peak": tool.result.peak / peak, "again": tool.result.rematerialisations / rounds}
            for title, tool in tools.items()
        }
        found[name] = {"example": pair.example, "bytes": peak, "seconds": seconds, "came": came}
    return {"models": found}

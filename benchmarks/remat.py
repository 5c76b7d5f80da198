"""What training within a budget of memory takes: time of a step over the bare one, and ops that ran again."""

import functools
from typing import Any

from _measure import (
    BARE,
    Variant,
    controls,
    interleaved,
    pin_to_one_core,
    processor_seconds,
    progress,
    script,
)
from _models import models, training

import amanda
from amanda.tools.remat import RematTool

SHARES = (None, 1.0, 0.75, 0.5, 0.4)
SECONDS = 60.0


def benchmark(quick: bool) -> dict[str, Any]:
    """Models -> "seconds" of steps by share of what the model needs, and what "came" of each budget."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in models().items():
        if quick and found:
            continue
        progress(f"  {name}")
        step = training(*(pair.twin if quick else pair.wide)())
        free = RematTool()
        with amanda.apply(free):
            step()
        peak = free.result.peak
        tools = {
            "no budget" if share is None else f"{100 * share:.0f} %": RematTool(
                None if share is None else int(share * peak)
            )
            for share in SHARES
        }
        variants: dict[str, Variant] = controls()
        variants.update({title: functools.partial(amanda.apply, tool) for title, tool in tools.items()})
        seconds = interleaved(
            variants,
            lambda _, step=step: processor_seconds(step),
            0.0 if quick else SECONDS,
            1 if quick else 5,
        )
        steps = len(seconds[BARE]) + 1
        came = {
            title: {"peak": tool.result.peak / peak, "again": tool.result.rematerialisations / steps}
            for title, tool in tools.items()
        }
        found[name] = {"example": pair.example, "bytes": peak, "seconds": seconds, "came": came}
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

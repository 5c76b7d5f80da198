"""Figures 10 and 11 in PyTorch: what the use cases add to training steps, in their routines and beside."""

import sys
from pathlib import Path
from typing import Any

from _use_cases import use_cases
from _zoo import in_pytorch

sys.path.append(str(Path(__file__).parents[1]))
from _measure import pin_to_one_core, progress, script
from _models import training
from tools import under_tools

SECONDS = {"wide": 75.0, "twin": 20.0}


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> "wide" and "twin" -> seconds of steps, and in routines, one value a round."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in in_pytorch(quick).items():
        found[name] = {"example": pair.example}
        for kind, seconds in SECONDS.items():
            progress(f"  {name}, {kind}")
            step = training(*getattr(pair, kind)())
            found[name][kind] = under_tools(
                step, use_cases(quick), 0.0 if quick else seconds, least=1 if quick else 5
            )
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

"""Figure 12 in PyTorch: training steps under the use cases with the cache on and off."""

import sys
from pathlib import Path
from typing import Any

from _use_cases import use_cases
from _zoo import in_pytorch

sys.path.append(str(Path(__file__).parents[1]))
from _measure import pin_to_one_core, progress, script
from _models import training
from tools import with_and_without_cache


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> use case -> seconds of steps with the cache on and off, one value a round."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in in_pytorch(quick).items():
        progress(f"  {name}")
        step = training(*pair.wide())
        cases = with_and_without_cache(step, use_cases(quick), 1 if quick else 5)
        found[name] = {"example": pair.example, "cases": cases}
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

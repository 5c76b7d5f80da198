"""Figure 12 in TensorFlow: training steps of sessions under the use cases with the cache on and off.

Processor time of the whole process on one core.
"""

import gc
import sys
from pathlib import Path
from typing import Any

from _use_cases import use_cases
from _zoo import in_tensorflow

sys.path.append(str(Path(__file__).parents[1]))
from _measure import Variant, interleaved, progress, script
from graphs import OFF, ON, on_one_core, seconds, under, without_cache

SECONDS = 15.0
"""For each model and use case; at least three rounds."""


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> use case -> seconds of steps with the cache on and off."""
    from _graph_models import in_a_session

    on_one_core()
    found: dict[str, Any] = {}
    for name, model in in_tensorflow(quick).items():
        found[name] = {"example": model.words, "cases": {}}
        step = in_a_session(model, training=True)
        for case, make in use_cases(quick).items():
            progress(f"  {name}, {case}")
            tool = make()
            variants: dict[str, Variant] = {ON: under(tool), OFF: lambda tool=tool: without_cache(tool)}
            found[name]["cases"][case] = interleaved(
                variants, lambda _, step=step: seconds(step), 0.0 if quick else SECONDS, 1 if quick else 3, 20
            )
        gc.collect()
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

"""Figures 10 and 11 in TensorFlow: what the use cases add to training steps of sessions.

Routines that compute are a part of the graph that runs, so that no clock is around them: the framework's own
is what is left with routines that do nothing.  Processor time of the whole process on one core.
"""

import gc
import sys
from pathlib import Path
from typing import Any

from _use_cases import use_cases
from _zoo import in_tensorflow

sys.path.append(str(Path(__file__).parents[1]))
from _measure import Variant, controls, interleaved, progress, script
from _wrapping import hollow
from graphs import on_one_core, seconds, under

SECONDS = {"wide": 40.0, "twin": 10.0}
HOLLOW = "{}, hollow"


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> "wide" and "twin" -> variant -> seconds of steps; hollow variants of the twin alone."""
    from _graph_models import in_a_session

    on_one_core()
    found: dict[str, Any] = {}
    for kind, most in SECONDS.items():
        for name, model in in_tensorflow(quick, narrowed=kind == "twin").items():
            progress(f"  {name}, {kind}")
            here = found.setdefault(name, {"example": model.words})
            step = in_a_session(model, training=True)
            variants: dict[str, Variant] = controls()
            for case, make in use_cases(quick).items():
                variants[case] = under(make())
                if kind == "twin":
                    variants[HOLLOW.format(case)] = under(hollow(make()))
            here[kind] = interleaved(
                variants, lambda _, step=step: seconds(step), 0.0 if quick else most, 1 if quick else 5, 40
            )
            gc.collect()  # of one graph and its copies
    return {"models": found}


if __name__ == "__main__":
    script(benchmark, __doc__)

"""Figure 12: training steps under the use cases with the cache on and off."""

import gc
import time
from typing import Any

from _measure import pin_to_one_core, progress
from _tools import with_and_without_cache
from _zoo import in_pytorch, in_tensorflow, use_cases


def eager() -> dict[str, Any]:
    """Return seconds of steps in PyTorch: model -> use case -> with the cache on and off."""
    from _models import training

    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in in_pytorch().items():
        progress(f"  {name}")
        cases = with_and_without_cache(training(*pair.wide()), use_cases())
        found[name] = {"example": pair.example, "cases": cases}
    return {"models": found}


def graph() -> dict[str, Any]:
    """Return the same of sessions of TensorFlow, in processor time of the whole process."""
    pin_to_one_core()
    from _graph_models import in_a_session

    found: dict[str, Any] = {}
    for name, model in in_tensorflow().items():
        progress(f"  {name}")
        step = in_a_session(model, training=True)
        cases = with_and_without_cache(
            step, use_cases(), seconds=15, least=3, most=20, clock=time.process_time
        )
        found[name] = {"example": model.words, "cases": cases}
        gc.collect()
    return {"models": found}

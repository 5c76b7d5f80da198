"""Figures 10 and 11: time that the use cases add to training steps, in their routines and beside.

In TensorFlow routines that compute are a part of the graph that runs, so that no clock is around them: the
framework's own part is the time that is added by routines that do nothing.
"""

import gc
from typing import Any

from _measure import controls, pin_to_one_core, progress
from _tools import scopes
from _zoo import in_pytorch, in_tensorflow, use_cases


def eager() -> dict[str, Any]:
    """Return seconds of steps, and in routines: model -> "wide" and "twin" -> one value a round."""
    from _clocked import under_tools
    from _models import training

    pin_to_one_core()
    found: dict[str, Any] = {}
    for name, pair in in_pytorch().items():
        found[name] = {"example": pair.example}
        for kind, seconds in {"wide": 75.0, "twin": 20.0}.items():
            progress(f"  {name}, {kind}")
            step = training(*getattr(pair, kind)())
            found[name][kind] = under_tools(step, use_cases(), seconds)
    return {"models": found}


def graph() -> dict[str, Any]:
    """Return seconds of steps of sessions: model -> "wide" and "twin" -> variant; hollow ones of the twin."""
    pin_to_one_core()
    from _graph_models import in_a_session
    from _wrapping import hollow
    from graphs import in_turns

    found: dict[str, Any] = {}
    hollow_cases = {f"{case}, hollow": lambda make=make: hollow(make()) for case, make in use_cases().items()}
    for kind, seconds in {"wide": 40.0, "twin": 10.0}.items():
        for name, model in in_tensorflow(narrowed=kind == "twin").items():
            progress(f"  {name}, {kind}")
            here = found.setdefault(name, {"example": model.words})
            under = controls() | scopes(use_cases()) | (scopes(hollow_cases) if kind == "twin" else {})
            here[kind] = in_turns(in_a_session(model, training=True), under, seconds)
            gc.collect()  # of one graph and its copies
    return {"models": found}

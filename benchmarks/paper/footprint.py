"""Figure 13: memory that use cases hold in a training step, by the size of the batch."""

import functools
import importlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _allocated import MALLOC, forget_peak, in_use, resident
from _measure import QUICK, in_own_process, progress
from _zoo import BERT, RESNET, in_pytorch, in_tensorflow, use_cases

import amanda

ONE = Path(__file__).with_name("footprint_one.py")
CASES = ("tracing", "pruning", "QAT")
Step = Callable[[], int]
"""A training step; gives the bytes in use at the end of its forward pass, or in a graph after it."""


def batches(framework: str) -> dict[str, Any]:
    """Return bytes: model -> batch -> those of `bytes_of`, each in a process of its own."""
    if platform.libc_ver()[0] != "glibc":
        return {"missing": "what is in use is read from glibc"}
    found: dict[str, Any] = {}
    for model in (RESNET,) if QUICK else (RESNET, BERT):
        found[model] = {}
        for batch in "12" if QUICK else "1248":
            progress(f"  {model}, batches of {batch}")
            found[model][batch] = in_own_process(ONE, framework, model, batch, **MALLOC)
    return {"models": found}


eager, graph = functools.partial(batches, "torch"), functools.partial(batches, "tf_keras")


def bytes_of(step: Step, start: int) -> dict[str, Any]:
    """Return the bytes in use in a bare step, its peak, and those more under each use case and hollow twin.

    start: resident bytes before the model was made.
    """
    from _wrapping import hollow

    for _ in range(2):
        step()
        forget_peak()
    found: dict[str, Any] = {"bare": step(), "peak": resident("VmHWM") - start, "cases": {}}
    cases = {name: make for name, make in use_cases().items() if name in CASES}
    for make in cases.values():  # a process keeps memory of the first time, which is no step's
        with amanda.apply(make()):
            step()
    found["first time"] = step() - found["bare"]
    for name, make in cases.items():
        found["cases"][name] = {"framework": held(step, hollow(make())), "whole": held(step, make())}
    return found


def held(step: Step, tool: amanda.Tool) -> int:
    """Return the bytes in use more in a second step under a tool than in a bare one before."""
    before = step()
    with amanda.apply(tool):
        step()
        return step() - before


def in_torch(name: str, batch: int) -> Step:
    """Return a training step of a model of `_zoo` in PyTorch."""
    import torch
    from memory import step

    model, example = in_pytorch()[name].wide()
    model.train()
    return functools.partial(step, model, torch.cat([example] * batch))


def in_keras(name: str, batch: int) -> Step:
    """Return the same in a session of TensorFlow."""
    import numpy as np
    from _graph_models import in_a_session

    models = in_tensorflow()
    model = models.get(name) or next(iter(models.values()))
    run = in_a_session(model._replace(example=np.concatenate([model.example] * batch)), training=True)

    def step() -> int:
        run()
        return in_use()

    return step


def one(framework: str, model: str, batch: str) -> dict[str, Any]:
    """Return the bytes of one training step; for a process of its own."""
    importlib.import_module(framework)
    start = resident()
    make = {"torch": in_torch, "tf_keras": in_keras}[framework]
    return bytes_of(make(model, int(batch)), start)

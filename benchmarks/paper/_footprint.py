"""Figure 13: memory that use cases hold in a training step, by the size of the batch.

python _footprint.py FRAMEWORK MODEL BATCH, with PYTHONMALLOC=malloc, gives the bytes of one training step.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _use_cases import use_cases
from _zoo import BERT, RESNET, in_pytorch, in_tensorflow

sys.path.append(str(Path(__file__).parents[1]))
from _allocated import forget_peak, in_own_process, in_use, resident
from _measure import progress

import amanda

MODELS, BATCHES = (RESNET, BERT), (1, 2, 4, 8)
CASES = ("tracing", "pruning", "QAT")
Step = Callable[[], int]
"""A training step; gives the bytes in use at the end of its forward pass, or in a graph after it."""


def batches(framework: str, quick: bool) -> dict[str, Any]:
    """Bytes: model -> batch -> what `bytes_of` gives, each in a process of its own."""
    if platform.libc_ver()[0] != "glibc":
        return {"missing": "what is in use is read from glibc"}
    found: dict[str, Any] = {}
    for model in MODELS[: 1 if quick else None]:
        found[model] = {}
        for batch in BATCHES[: 2 if quick else None]:
            progress(f"  {model}, batches of {batch}")
            found[model][str(batch)] = in_own_process(__file__, framework, model, str(batch), quick=quick)
    return {"models": found}


def bytes_of(step: Step, start: int, quick: bool) -> dict[str, Any]:
    """In use in a bare step, its peak, and what is in use more under each use case and its hollow twin.

    start: resident bytes before the model was made.
    """
    from _wrapping import hollow

    for _ in range(2):
        step()
        forget_peak()
    found: dict[str, Any] = {"bare": step(), "peak": resident("VmHWM") - start, "cases": {}}
    cases = {name: make for name, make in use_cases(quick).items() if name in CASES}
    for make in cases.values():  # what a process keeps of the first time is no step's
        with amanda.apply(make()):
            step()
    found["first time"] = step() - found["bare"]
    for name, make in cases.items():
        found["cases"][name] = {"framework": held(step, hollow(make())), "whole": held(step, make())}
    return found


def held(step: Step, tool: amanda.Tool) -> int:
    """Bytes in use more in a second step under a tool than in a bare one before."""
    before = step()
    with amanda.apply(tool):
        step()
        return step() - before


def pytorch(name: str, batch: int, quick: bool) -> Step:
    """A training step of a model of `_zoo` in PyTorch."""
    import torch
    from _held import step

    model, example = in_pytorch(quick)[name].wide()
    model.train()
    several = torch.cat([example] * batch)
    return lambda: step(model, several)


def tensorflow(name: str, batch: int, quick: bool) -> Step:
    """The same in a session of TensorFlow."""
    import numpy as np
    from _graph_models import in_a_session

    models = in_tensorflow(quick)
    model = models[name] if name in models else next(iter(models.values()))
    run = in_a_session(model._replace(example=np.concatenate([model.example] * batch)), training=True)

    def step() -> int:
        run()
        return in_use()

    return step


STEPS = {"PyTorch": pytorch, "TensorFlow": tensorflow}


def one(framework: str, model: str, batch: int) -> dict[str, Any]:
    """What the script gives with arguments of its own."""
    quick = bool(os.environ.get("AMANDA_BENCH_QUICK"))
    start_of = {"PyTorch": "torch", "TensorFlow": "tf_keras"}
    __import__(start_of[framework])
    start = resident()
    return bytes_of(STEPS[framework](model, batch, quick), start, quick)


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], int(sys.argv[3]))))

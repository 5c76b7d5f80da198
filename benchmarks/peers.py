"""Programs under each tool, and with what else does the tool's work; and the first step under each tool.

Keras' `fit` has the tools alone.  fvcore and TorchLens look at one forward pass, and not at a program.
"""

import copy
import functools
import gc
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _measure import (
    AGAIN,
    BARE,
    QUICK,
    Times,
    Variant,
    controls,
    in_own_process,
    interleaved,
    pin_to_one_core,
    progress,
)
from _measure import seconds_of as seconds
from _peers import (
    PEERS,
    TOOLS,
    Step,
    generating,
    large_models,
    llama,
    small_models,
    training,
    variants_of,
)
from _tools import BACKWARD, Inserting, is_no_leaf, scopes
from torch import nn

# A rate of 0 takes the same ops, and thousands of steps do not lead to numbers that are not finite.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.0)
BLOCKS = {"forward + backward": None, "forward + backward + AdamW": ADAMW}
TITLE = "{}, training"
HOOKS = "routines at backward ops that do nothing"
BLOCK = 0.005
"""Seconds of one timing, at least."""
SHORT = 0.1
"""Seconds of a program that runs once between the opening of a scope and a timing, since it goes on there."""
FIRST = 1 if QUICK else 5
"""Processes in which a first step is measured, of each tool and model."""


def compared(program: Callable[[Any], Step], model: nn.Module, most: float, least: int = 7) -> Times:
    """Return processor seconds of a program by variant; for so many seconds, and at least so many rounds."""
    under = {
        **controls(),
        **scopes({HOOKS: functools.partial(Inserting, *BACKWARD, select=(), where_backward=is_no_leaf)}),
        **scopes(TOOLS),
        **PEERS,
    }
    steps = {**dict.fromkeys(under, program(model))}
    steps |= {name: program(other) for name, other in variants_of(model).items()}
    steps[BARE]()
    bare = seconds(steps[BARE])
    repeats = 1 if QUICK else max(1, int(BLOCK / bare))

    def measure(name: str) -> float:
        step = steps[name]
        if bare < SHORT and not QUICK:
            step()
        return seconds(lambda: [step() for _ in range(repeats)]) / repeats

    return interleaved(under, measure, most, least, 40)


def first_steps(step: Step) -> dict[str, Times]:
    """Return processor seconds of a bare step and of the first step under each tool: tool -> which -> values.

    Each is of a process of its own, a fork of this one, in which Amanda has seen no op yet.
    """
    found: dict[str, Times] = {}
    for repetition in range(FIRST + 1):
        for name, scope in {AGAIN: nullcontext, **scopes(TOOLS)}.items():
            seconds_by_part, modules = first_step(step, scope)
            if repetition == 0:  # tells what is imported
                for module in modules:
                    with suppress(ImportError):
                        importlib.import_module(module)
                gc.collect()  # else what the imports left is collected in some tool's first step
                continue
            times = found.setdefault(name, {BARE: [], "first": []})
            for values, value in zip(times.values(), seconds_by_part, strict=True):
                values.append(value)
    return found


def first_step(step: Step, scope: Variant) -> tuple[tuple[float, float], list[str]]:
    """Return processor seconds of a bare step and of the first in a scope, in a fork; and its modules."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def child() -> None:
        bare = median(seconds(step) for _ in range(9))  # the first ones copy memory that the fork shares
        with scope():
            sender.send(((bare, seconds(step)), list(sys.modules)))

    process = fork.Process(target=child)
    process.start()
    sender.close()  # so that a process that ends early is noticed
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    finally:
        process.join()


def fit() -> Times:
    """Return processor seconds of Keras' `fit` on eight batches, bare and under each tool."""
    import keras
    import numpy as np

    convolutions = [keras.layers.Conv2D(32, 3, activation="relu") for _ in range(3)]
    ends = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *ends])
    model.compile("sgd", "mse")
    x, y = np.ones((128, 32, 32, 3), np.float32), np.ones((128, 10), np.float32)

    def measure(_: str) -> float:
        return float(seconds(lambda: model.fit(x, y, batch_size=16, verbose=0), time.process_time))

    return interleaved({**controls(), **scopes(TOOLS)}, measure, 15, most=40)


def look(name: str) -> Times:
    """Return processor seconds of an analysis of a model's forward pass, for a process of its own.

    TorchLens leaves torch's functions wrapped.
    """
    import torchlens
    from fvcore.nn import FlopCountAnalysis

    pin_to_one_core()
    model, given = {**large_models(), **small_models()}[name]
    looks = {
        "fvcore": lambda: FlopCountAnalysis(model, given).total(),
        "TorchLens": lambda: torchlens.trace(copy.deepcopy(model), given),
    }
    return {what: [seconds(program) for _ in range(3)][1:] for what, program in looks.items()}


def benchmark() -> dict[str, Any]:
    """Return seconds by program and variant: "steps" of small models by block, their "first", "programs"."""
    pin_to_one_core()
    torch.manual_seed(0)
    small = dict(list(small_models().items())[-1 if QUICK else 0 :])
    first = {}
    for name, (model, given) in small.items():  # before Amanda has seen any op
        progress(f"  {name}, first steps")
        first[name] = first_steps(training(given)(model))
    steps: dict[str, Any] = {block: {} for block in BLOCKS}
    for block, optimizer in BLOCKS.items():
        for name, (model, given) in small.items():
            progress(f"  {name}, {block}")
            steps[block][name] = compared(training(given, optimizer), model, 12, 12)
    programs = {}
    for name, (model, given) in large_models().items() if not QUICK else ():
        progress(f"  {name}")
        programs[TITLE.format(name)] = compared(training(given), model, 10, 5)
    model, prompt = llama()
    progress("  Llama")
    programs["Llama of 4 layers, 16 new tokens"] = compared(generating(prompt), model, 15)
    progress("  Keras")
    programs["Keras, fit"] = fit()
    for name in [] if QUICK else ("ResNet-50, 1 image of 224 x 224", *small):
        progress(f"  {name}, fvcore and TorchLens")
        into = steps["forward + backward"] if name in small else programs
        into[name if name in small else TITLE.format(name)] |= in_own_process(
            Path(__file__).with_name("peers_look.py"), name
        )
    return {"steps": steps, "first": first, "programs": programs}

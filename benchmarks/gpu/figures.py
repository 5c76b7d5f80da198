"""Figures 10 to 13 of the paper's evaluation on the device: models and use cases of benchmarks/paper."""

import functools
from typing import Any

import torch
from _cases import Cases
from _device import allocated, peak, placed, timed, wall
from _measure import QUICK, controls
from _models import Pair, training
from _tools import scopes, with_and_without_cache
from _wrapping import hollow
from _zoo import BERT, RESNET, in_pytorch, use_cases
from footprint import CASES, held
from memory import step as held_in_step


def stage(cases: Cases) -> None:
    """Measure each figure, model by model."""
    pairs = in_pytorch()
    for name, pair in pairs.items():
        cases(f"10, 11: {name}, batch of 1", overhead, pair, 1)
    for name in (RESNET,) if QUICK else (RESNET, BERT):
        for batch in (1, 2) if QUICK else (1, 2, 4, 8):
            cases(f"13: {name}, batch of {batch}", memory, pairs[name], batch)
    for name, pair in pairs.items():
        cases(f"12: {name}, batch of 1", cache, pair)
    for name, pair in pairs.items() if not QUICK else ():
        cases(f"10, 11: {name}, batch of 32", overhead, pair, 32)


def batched(pair: Pair, batch: int) -> Any:
    """Return a model as it is used, in training, and so many examples."""
    model, example = placed(pair.wide)
    return model.train(), torch.cat([example] * batch)


def overhead(pair: Pair, batch: int) -> dict[str, Any]:
    """Return seconds of a training step under each use case, and with routines that do nothing instead."""
    hollows = {f"{case}, hollow": lambda make=make: hollow(make()) for case, make in use_cases().items()}
    under = controls() | scopes(use_cases()) | scopes(hollows)
    return timed(training(*batched(pair, batch)), under, 3)


def cache(pair: Pair) -> dict[str, Any]:
    """Return seconds of a training step under each use case, with the cache on and off."""
    step = training(*batched(pair, 1))
    return {"cases": with_and_without_cache(step, use_cases(), seconds=1, least=3, most=20, clock=wall)}


def memory(pair: Pair, batch: int) -> dict[str, Any]:
    """Return bytes of the device that use cases hold at the end of the forward pass, and the bare peak."""
    model, example = batched(pair, batch)
    step = functools.partial(held_in_step, model, example, allocated)
    step()
    made = {name: make for name, make in use_cases().items() if name in CASES}
    found = {
        name: {"framework": held(step, hollow(make())), "whole": held(step, make())}
        for name, make in made.items()
    }
    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    return {"peak": peak(step) + weights, "cases": found}

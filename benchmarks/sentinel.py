"""Cost of training under the sentinel, in steps that are watched and others, and what it finds of faults."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from _measure import QUICK, Times, controls, pin_to_one_core, progress, steps_in_turns
from _models import models, training

import amanda
from amanda.tools.inject import InjectTool
from amanda.tools.sentinel import SentinelTool

BUDGET = 0.01
SHARES = (0.0, 0.25, 1.0)
SHAPES: dict[str, dict[str, Any]] = {
    "one bit": {"fault": "bit_flip"},
    "3 adjacent bits": {"fault": "multi_bit", "flips": 3},
    "stuck lane": {"fault": "bit_flip", "axis": -1, "permanent": True},
    "wrong row": {"fault": "wrong_row"},
    "1 % NaN": {"fault": "nan", "probability": 0.01},
}
SELECTED = ("linear", "conv2d", "batch_norm", "layer_norm", "softmax", "gelu")


def benchmark() -> dict[str, Any]:
    """Return seconds of steps and what a run with a budget spent, by model; the share of faults found."""
    pin_to_one_core()
    costs: dict[str, Any] = {}
    for name, pair in list(models().items())[: 1 if QUICK else None]:
        progress(f"  {name}")
        torch.manual_seed(0)
        costs[name] = {"example": pair.example, "seconds": _seconds(training(*pair.usual()))}
        costs[name] |= _long(training(*pair.twin()))
    progress("  faults")
    return {"models": costs, "found": {name: _found(shape) for name, shape in SHAPES.items()}}


def _steps(step: Any, tools: dict[str, SentinelTool], number: int, **options: Any) -> Times:
    """Return the processor seconds of so many steps, bare, bare again, and under each tool."""
    applied: list[SentinelTool] = []

    @contextmanager
    def under(tool: SentinelTool) -> Iterator[None]:
        with amanda.apply(tool):
            applied.append(tool)
            yield
            applied.clear()

    def several() -> None:
        for _ in range(number):
            step()
            for tool in applied:
                tool.step()

    variants = controls() | {name: partial(under, tool) for name, tool in tools.items()}
    return steps_in_turns(several, variants, **options)


def _seconds(step: Any) -> Times:
    """Return the processor seconds of steps: bare, where none is watched, and watched."""
    tools = {"not watched": SentinelTool(budget=1e-9)}
    for share in SHARES:
        tools[f"watched, {share:.0%} run again"] = SentinelTool(budget=None, share=share)
    return _steps(step, tools, 1, seconds=60, most=100)


def _long(step: Any) -> dict[str, Any]:
    """Return the processor seconds of rounds of steps with a budget and without, and what was spent of it."""
    tool = SentinelTool(budget=BUDGET)
    rounds = _steps(step, {f"budget of {BUDGET:.0%}": tool}, 5 if QUICK else 100, least=30, most=30)
    result = tool.result
    return {"long": rounds, "spent": result.spent / result.passed, **asdict(result.counts)}


def _found(shape: dict[str, Any], trials: int = 2 if QUICK else 40) -> dict[str, float]:
    """Return the share of faults, one in each trial, that ops which run again tell, by the share of these."""
    found = {}
    for share in SHARES[1:]:
        hits = made = 0
        for trial in range(trials):
            chance = random.Random(trial)
            pair = models()[chance.choice(["ResNet-50", "BERT-base"])]
            step = training(*pair.twin())
            faults = InjectTool(**shape, type=chance.choice(SELECTED), start=1, end=2, seed=trial)
            sentinel = SentinelTool(budget=None, share=share, seed=trial)
            with amanda.apply(faults, sentinel):
                for _ in range(2):
                    step()
                    sentinel.step()
            changed = {
                (one.op, one.execution) for one in faults.result.injections if repr(one.old) != repr(one.new)
            }
            made += len(changed)
            hits += sum(one.corrupt for one in sentinel.result.ops)
        found[f"{share:.0%}"] = hits / max(made, 1)
    return found

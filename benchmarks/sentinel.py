"""Cost of training under the sentinel, in steps that are watched and others, and its recall of faults."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from _measure import QUICK, Times, controls, pin_to_one_core, progress, steps_in_turns
from _models import Pair, models, training
from torch import nn

import amanda
from amanda.tools.inject import InjectTool
from amanda.tools.sentinel import SentinelTool

BUDGET, SHARE = 0.01, 0.1
FAULTS: dict[str, dict[str, Any]] = {
    "one bit": {"fault": "bit_flip"},
    "3 adjacent bits": {"fault": "multi_bit", "flips": 3},
    "stuck lane": {"fault": "stuck_at_1", "axis": -1},
    "wrong row": {"fault": "wrong_row"},
    "1 % NaN": {"fault": "nan", "probability": 0.01},
}
MODELS = ("ResNet-50", "BERT-base")
MODULES = 8
"""Modules with a fault in each op, in a step with faults."""
TRIALS = 2
"""Steps with faults, for each model and fault: half forward, half backward."""
CLEAN = 3
"""Watched steps without faults."""
ROUNDS, LONG_ROUNDS, STEPS = 3, 20, 5
"""Rounds of a step of a model, and of some steps of its narrow twin."""


def benchmark() -> dict[str, Any]:
    """Return, by model, seconds of steps, what a run with a budget spent, and the faults that were found."""
    pin_to_one_core()
    logging.getLogger("amanda").setLevel(logging.CRITICAL)  # alarms are expected
    found: dict[str, Any] = {}
    for name in MODELS[: 1 if QUICK else None]:
        progress(f"  {name}")
        torch.manual_seed(0)
        pair = models()[name]
        model, example = pair.usual()
        step = training(model, example)
        found[name] = {"example": pair.example, "seconds": _seconds(step)}
        progress("    steps of the twin")
        found[name] |= _long(pair)
        progress("    faults")
        found[name] |= {"faults": _faults(model, step), "clean": _clean(step)}
    return {"models": found}


def _steps(step: Any, tools: dict[str, SentinelTool], number: int, rounds: int) -> Times:
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
    return steps_in_turns(several, variants, least=rounds, most=rounds)


def _seconds(step: Any) -> Times:
    """Return the processor seconds of steps: bare, where none is watched, and watched."""
    tools = {"not watched": SentinelTool(budget=1e-9)}
    for share in (SHARE, 1.0):
        tools[f"watched, {share:.0%} of the ops"] = SentinelTool(budget=None, share=share)
    return _steps(step, tools, 1, ROUNDS)


def _long(pair: Pair) -> dict[str, Any]:
    """Return the processor seconds of rounds of a twin's steps, and what was spent of a budget."""
    tool = SentinelTool(budget=BUDGET)
    tools = {"not watched": SentinelTool(budget=1e-9), f"budget of {BUDGET:.0%}": tool}
    times = _steps(training(*pair.twin()), tools, STEPS, LONG_ROUNDS)
    result = tool.result
    return {"long": times, "spent": result.spent / result.passed, **asdict(result.counts)}


def _clean(step: Callable[[], None]) -> dict[str, Any]:
    """Return the alarms of steps without faults, and the executions run again and left."""
    sentinel = SentinelTool(budget=None, share=1.0)
    with amanda.apply(sentinel):
        for _ in range(1 if QUICK else CLEAN):
            step()
            sentinel.step()
    result = sentinel.result
    return {
        "steps": result.counts.watched, "alarms": list(map(str, result.alarms)), "left": result.left,
        "again": sum(one.recomputed for one in result.ops), "seen": sum(one.executions for one in result.ops),
    }  # fmt: skip


def _faults(model: nn.Module, step: Callable[[], None]) -> dict[str, Any]:
    """Return by fault how many ops had one and how many were named, with all ops run again.

    Each step starts from the same buffers.  A named op has a "corruption" alarm.  Ops whose faults are beyond
    the limit of those that are kept count for neither.
    """
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    places = [name for name, _ in model.named_modules() if name]
    found: dict[str, Any] = {}
    for fault, options in FAULTS.items():
        made = hits = 0
        for trial in range(TRIALS):
            modules = random.Random(trial).sample(places, MODULES)
            target = "grad_inputs" if trial % 2 else "outputs"
            faults = InjectTool(**options, target=target, module=modules, seed=trial, limit=100_000)
            sentinel = SentinelTool(budget=None, share=1.0)
            with amanda.apply(faults, sentinel):
                step()
                sentinel.step()
            for name, one in model.named_buffers():
                one.copy_(buffers[name])
            changed = _changed(faults)
            named: Counter[tuple[str, ...]] = Counter()
            for one in sentinel.result.ops:
                named[one.phase, one.type, one.module, one.source] += one.corrupt
            made += changed.total()
            hits += (changed & named).total()
        found[fault] = {"made": made, "named": hits}
    return found


def _changed(faults: InjectTool) -> Counter[tuple[str, ...]]:
    """Return how many ops at each place have an element that a fault changed."""
    ops = {
        (one.op, one.phase, one.type, one.module, one.source)
        for one in faults.result.injections
        if repr(one.old) != repr(one.new)
    }
    return Counter(key for _, *rest in ops for key in [tuple(rest)])

"""Run by instructions.py under callgrind: the same calls in several states, each count dumped by name."""

import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import _callgrind  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F
from _measure import AGAIN, BARE, QUICK

SETTLING = 200
FEW, MANY = 200, 1200
STEP, SETTLING_STEPS, FEW_STEPS, MANY_STEPS = "step", 12, 2, 6
"""A training step among the programs; it takes as long as hundreds of ops."""
x, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
linear = torch.nn.Linear(4, 4)
PROGRAMS: dict[str, Callable[[], object]] = {
    "a + b": lambda: x + weight,
    "F.linear(x, w, b)": lambda: F.linear(x, weight, bias),
    "nn.Linear(4, 4)(x)": lambda: linear(x),
}


def count(state: str, under: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Dump the counts of few and of many calls of each program; the difference is free of all else."""
    for name, program in list(PROGRAMS.items())[: 1 if QUICK else None]:
        gc.collect()
        with under():
            count_calls(f"{state}|{name}", program, SETTLING, FEW, MANY)


def count_calls(name: str, program: Callable[[], object], settling: int, *each: int) -> None:
    """Dump the counts of so many calls."""
    run(program, settling)
    for calls in each:
        _callgrind.lib.begin()
        run(program, calls)
        _callgrind.lib.end(f"{name}|{calls}".encode())


def count_steps() -> None:
    """Dump the counts of a training step of 20 linear layers, bare, under each tool and beside its peer."""
    from _peers import PEERS, TOOLS, layers, training, variants_of
    from _tools import scopes

    model, given = layers()
    program = training(given)
    steps = {name: program(other) for name, other in variants_of(model).items()}
    bare = program(model)
    under = {BARE: nullcontext, AGAIN: nullcontext, **scopes(TOOLS)} | ({} if QUICK else PEERS)
    for name, scope in under.items():
        gc.collect()
        with scope():
            count_calls(f"{name}|{STEP}", steps.get(name, bare), SETTLING_STEPS, FEW_STEPS, MANY_STEPS)


def run(program: Callable[[], object], calls: int) -> None:
    """Call a program."""
    for _ in itertools.repeat(None, calls):
        program()


def main() -> None:
    """Count every state, in the only possible order."""
    gc.disable()
    torch.set_num_threads(1)
    count("torch alone")
    count("torch alone, again")

    import amanda

    count("after import amanda")

    from _others import DispatchMode, FunctionMode, MonkeyPatch, module_hooks, scope_elsewhere, switched_off
    from _tools import FORWARD, Inserting

    from amanda.tools.sentinel import SentinelTool

    empty, routines, patch = Inserting(), Inserting(*FORWARD), MonkeyPatch()
    for tool in (empty, routines):
        with amanda.apply(tool):
            for program in PROGRAMS.values():
                program()
    count("after scopes")
    count("empty tool", lambda: amanda.apply(empty))
    if not QUICK:
        count("disabled in a scope", lambda: switched_off(empty))
        count("before + after", lambda: amanda.apply(routines))
        count("TorchFunctionMode", FunctionMode)
        count("TorchDispatchMode", DispatchMode)
        count("monkey-patch", lambda: patch)
        count("sentinel, step not watched", lambda: amanda.apply(SentinelTool()))
        count("module hooks", lambda: module_hooks(linear))
        count("after all")
    count_steps()
    if not QUICK:
        # Last: with a second thread the C library begins to lock.
        count("scope in another thread", lambda: scope_elsewhere(empty))


if __name__ == "__main__":
    main()

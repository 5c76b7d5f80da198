"""Added cost per op, forward, beside the means that people use today."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _measure import QUICK, Times, Variant, controls, interleaved, pin_to_one_core, progress
from _others import (
    ChangingMode,
    DispatchMode,
    FunctionMode,
    MonkeyPatch,
    module_hooks,
    scope_elsewhere,
    switched_off,
)
from _tools import FORWARD, Inserting, chosen, scopes
from torch import Tensor, nn

import amanda

BLOCK = 0.004
"""Seconds of one timing: long beside the clock, short beside what disturbs."""
SETTLING = 100
"""Calls before a timing; an op in a loop has its last id after 64."""
VALUE = torch.randn(4, 4)


class Replacing(amanda.Tool):
    """Gives a value instead of each op."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.replace_op(lambda *values: VALUE))


TOOLS = {
    **chosen("empty tool", "empty tool, backward too", "before", "after", "before + after"),
    "before + after, hand values back": lambda: Inserting(
        *FORWARD, routine=lambda value: value, select=[0]
    ),
    "before, another value": lambda: Inserting(
        "before", routine=lambda _: VALUE, select=[0],
        where=lambda context: getattr(context.get_inputs()[0], "shape", None) == VALUE.shape,
    ),
    "after, another value": lambda: Inserting("after", routine=lambda _: VALUE, select=[0]),
    "replacement": Replacing,
    **chosen("backward before + after"),
}  # fmt: skip


def programs() -> dict[str, tuple[Callable[[], Tensor], nn.Module | None]]:
    """Return programs of one op by name, and the module that each calls."""
    x, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    trained, shift = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    linear = nn.Linear(4, 4)
    return {
        "a + b": (lambda: x + weight, None),
        "x.relu()": (lambda: x.relu(), None),
        "F.linear(x, w, b)": (lambda: F.linear(x, weight, bias), None),
        "F.linear, w needs a gradient": (lambda: F.linear(x, trained, shift), None),
        "nn.Linear(4, 4)(x)": (lambda: linear(x), linear),
    }


def variants(module: nn.Module | None, patch: MonkeyPatch) -> dict[str, Variant]:
    """Return the tools and their peers that programs run under."""
    empty = Inserting()
    found: dict[str, Variant] = {
        **controls(),
        "scope in another thread": lambda: scope_elsewhere(empty),
        "disabled in a scope": lambda: switched_off(empty),
        **scopes(TOOLS),
        "TorchFunctionMode": FunctionMode,
        "TorchFunctionMode, another value before": lambda: ChangingMode(VALUE),
        "TorchFunctionMode, another value after": lambda: ChangingMode(VALUE, after=True),
        "TorchDispatchMode": DispatchMode,
        "monkey-patch": lambda: patch,
    }
    return found if module is None else {**found, "module hooks": lambda: module_hooks(module)}


def nanoseconds(call: Callable[[], Tensor], calls: int, then_backward: bool = False) -> float:
    """Return the processor time of one call, on average over `calls`.

    If asked for, a backward pass from the last result follows, after the time was taken.
    """
    start = time.thread_time_ns()
    for _ in itertools.repeat(None, calls):
        result = call()
    taken = time.thread_time_ns() - start
    if then_backward and result.requires_grad:
        result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
    return taken / calls


def per_op(program: Callable[[], Tensor], under: dict[str, Variant], seconds: float = 6) -> Times:
    """Return the nanoseconds of a program under each variant, once a round."""
    calls = dict.fromkeys(under, SETTLING)

    def measure(name: str) -> float:
        # From one line, since an op's id tells apart the ways to it: what is timed is what has settled.
        for count, then_backward in [(1, True)] * SETTLING + [(SETTLING, False), (calls[name], False)]:
            taken = nanoseconds(program, count, then_backward)
        calls[name] = 50 if QUICK else max(200, int(BLOCK * 1e9 / taken))
        return taken

    return interleaved(under, measure, seconds, most=60)


def benchmark() -> dict[str, Any]:
    """Return nanoseconds per op: program -> variant -> one value a round."""
    pin_to_one_core()
    patch = MonkeyPatch()
    found = {}
    for name, (program, module) in programs().items():
        progress(f"  {name}")
        found[name] = {"ns": per_op(program, variants(module, patch))}
    return {"programs": found}

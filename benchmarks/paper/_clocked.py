"""Steps under tools with a clock around their routines: the routines' part of the cost, and the framework's.

A tool's own part is the time in its routines, which a clock around each takes, and in the gradients that
autograd computes of them. The framework's part is taken on a model's narrow twin, where the same operators
have little to compute: the time that the tool adds to the twin's step, less the tool's own part there.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from _measure import BARE, controls, interleaved, seconds_of
from _tools import Make, scopes
from _wrapping import wrap
from torch.utils._pytree import tree_leaves

import amanda
from amanda.action import Routine


class Clock:
    """The time in the routines of a tool and of those that it depends on, and in their gradients."""

    def __init__(self, tool: amanda.Tool) -> None:
        self.seconds = 0.0
        self._begun = 0.0
        wrap(tool, self._timed)

    def _timed(self, routine: Routine) -> Routine:
        def timed(*values: Any, **kwargs: Any) -> Any:
            self._start()
            try:
                result = routine(*values, **kwargs)
            finally:
                self._stop()
            for node in made_between(values, result):
                node.register_prehook(self._start)
                node.register_hook(self._stop)
            return result

        return timed

    def _start(self, *_: Any) -> None:
        self._begun = time.thread_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.thread_time() - self._begun


def made_between(values: Any, result: Any) -> Iterator[Any]:
    """Yield the autograd nodes that lead from a result to values, those of the values left out."""
    known = {tensor.grad_fn for tensor in tensors_in(values)}
    left = [tensor.grad_fn for tensor in tensors_in(result)]
    while left:
        node = left.pop()
        if node is not None and node not in known and node.name() != "torch::autograd::AccumulateGrad":
            known.add(node)
            yield node
            left += [after for after, _ in node.next_functions]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among values and their parts."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def under_tools(step: Callable[[], None], tools: Mapping[str, Make], seconds: float) -> dict[str, Any]:
    """Return seconds of steps, bare and under each tool; and, of clocked steps, seconds in the routines."""
    clocked = {name: make() for name, make in tools.items()}
    clocks = {f"{name}, clocked": Clock(tool) for name, tool in clocked.items()}
    under = controls() | scopes(tools)
    under |= {f"{name}, clocked": functools.partial(amanda.apply, tool) for name, tool in clocked.items()}
    inside: dict[str, list[float]] = {name: [] for name in clocks}

    def measure(name: str) -> float:
        before = clocks[name].seconds if name in clocks else 0.0
        taken = seconds_of(step)
        if name in clocks:
            inside[name].append(clocks[name].seconds - before)
        return taken

    whole = interleaved(under, measure, seconds, 5, 40)
    rounds = len(whole[BARE])
    return {
        "whole": {name: taken for name, taken in whole.items() if name not in clocks},
        "inside": {name.removesuffix(", clocked"): taken[-rounds:] for name, taken in inside.items()},
    }

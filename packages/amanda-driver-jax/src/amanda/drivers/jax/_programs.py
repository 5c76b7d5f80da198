"""Programs that are being traced: what has been put into each, and where its arguments come from."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
from jax._src import core


class _Thread(threading.local):
    """insertions, taps: put into programs so far.  rules: of derivatives of functions in these, by name.

    calls: the jitted functions that are traced as parts.
    made: what the part gave that was traced last, until the program around it has symbols for that.
    """

    def __init__(self) -> None:
        self.insertions = 0
        self.taps = 0
        self.rules: list[str] = []
        self.calls: list[tuple[Any, list[Any], list[Any]]] = []
        self.made: list[Any] = []


_thread = _Thread()


@dataclass
class Counts:
    """Routines and taps that were put into a program, and functions in it with rules for derivatives."""

    insertions: int
    taps: int
    rules: list[str] = field(default_factory=list)


def inserted() -> None:
    """Note that a routine is in the program that is traced."""
    _thread.insertions += 1


def tapped() -> None:
    """Note that the program that is traced shows cotangents, if derivatives are taken of it."""
    _thread.taps += 1


def ruled(function: str) -> None:
    """Note that a function in the program that is traced has a rule that computes values and tangents."""
    _thread.rules.append(function)


@contextmanager
def counting() -> Iterator[Counts]:
    """Context that counts, until it is left."""
    counts, before = Counts(-_thread.insertions, -_thread.taps), len(_thread.rules)
    yield counts
    counts.insertions += _thread.insertions
    counts.taps += _thread.taps
    counts.rules += _thread.rules[before:]
    if core.trace_state_clean():
        _thread.rules.clear()


def part(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return a function to be traced as a part of the program around it, which calls it with these arguments.

    It is a new function each time, so JAX traces it anew: each call has ops of its own.
    """
    outer = jax.tree_util.tree_leaves((args, kwargs))

    def traced(*args: Any, **kwargs: Any) -> Any:
        inner = jax.tree_util.tree_leaves((args, kwargs))
        _thread.calls.append((core.trace_ctx.trace, inner, outer))
        try:
            results = function(*args, **kwargs)
        finally:
            _thread.calls.pop()
        _thread.made = jax.tree_util.tree_leaves(results)
        return results

    wraps(function)(traced)
    del traced.__wrapped__  # type: ignore[attr-defined]
    return traced


def made() -> list[Any]:
    """Return what the part gave that was traced last, once."""
    found, _thread.made = _thread.made, []
    return found


def passed(value: Any) -> Any:
    """Return the value that the program around a part has passed to it as this argument; None for others."""
    for trace, inner, outer in reversed(_thread.calls):
        if trace is value._trace:
            return next((two for one, two in zip(inner, outer, strict=False) if one is value), None)
    return None

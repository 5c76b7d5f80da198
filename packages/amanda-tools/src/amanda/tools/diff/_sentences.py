"""The answer of a comparison in a sentence, and how the error grows, in lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from amanda.tools.diff._comparison import Comparison
from amanda.tools.dump import Entry, Op

if TYPE_CHECKING:
    from amanda.tools.diff._result import DiffResult

_STEP = 2.0
"""How many times the error before it an error is that the growth shows."""
_SHOWN = 8
_READ = 2
"""Tensors that an op read that are named."""


def sentence(result: DiffResult) -> str:
    """Return where the runs part, against what is expected, what the op read, and what a's value proves."""
    first = result.first
    if first is None:
        worst = max(result.comparisons, key=lambda one: one.relative)
        if not worst.relative:
            return f"No op parts: all {len(result.comparisons):,} are the same to the last bit"
        return f"No op parts: the largest relative error is {_error(worst)}, at {worst.place}"
    if first.failure:
        return f"b fails at {first.place}: {first.failure}"
    parts = [f"b parts from a at {first.place}: relative error {_error(first)}"]
    if first.reason:
        parts.append(first.reason)
    if first.is_retyped:
        parts.append(f"it gives {first.dtypes[0]} in a and {first.dtypes[1]} in b")
    if first.read:
        agreement = {None: "were", True: "agree", False: "differ already"}[first.inputs]
        parts.append(f"its inputs {agreement} ({first.read})")
    if first.weight:
        parts.append(f"its weight differs by {first.weight:.2g}")
    if result.remaining is not None:
        parts.append(_proof(first, result.remaining))
    return "; ".join(parts)


def _error(one: Comparison) -> str:
    if one.expected is None:
        return f"{one.relative:.2g}, where {one.tolerance:.2g} is allowed"
    return f"{one.relative:.2g}, where {one.expected:.2g} is expected"


def _proof(first: Comparison, remaining: DiffResult) -> str:
    """Say what is left of the difference where the op, or the op that reads it, gives a's value in b."""
    replaced = f"with a's value in {'the place of what reads it' if first.only else 'its place'}"
    if remaining.first is None:
        worst = max((one.relative for one in remaining.comparisons), default=0.0)
        left = "not one bit of it" if not worst else f"no more than {worst:.2g}"
        return f"{replaced}, {left} remains"
    there = remaining.first
    if there.place == first.place and there.dtypes[0] != there.dtypes[1]:
        return f"{replaced}, rounded to {there.dtypes[1]}, {there.relative:.2g} remains there"
    return f"{replaced}, b parts next at {there.place}: {there.relative:.2g}"


def growth(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the first op that diverges, those at which the error is twice what it was, and the last op."""
    at = next((i for i, one in enumerate(comparisons) if one.diverges), None)
    if at is None or comparisons[at].failure:
        return []
    steps = [comparisons[at]]
    for one in comparisons[at + 1 :]:
        if one.relative >= _STEP * steps[-1].relative and len(steps) < _SHOWN:
            steps.append(one)
    last = comparisons[-1]
    return steps if last is steps[-1] else [*steps, last]


def growth_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a line for each op of `growth`."""
    steps = growth(comparisons)
    lines = [f"  {one.relative:9.2g}  {one.place}, execution {one.execution}" for one in steps]
    return ["How the error grows, up to the last op:", *lines] if lines else []


def reading(read: Iterable[tuple[Entry, float, bool]], op: Op) -> str:
    """Say what an op of run a read: those that differ, with relative errors, or else the first ones.

    read: tensors of run a, their relative errors, and whether they agree.
    """
    parameters = dict(op.parameters)
    tensors = list(read)
    chosen = [one for one in tensors if not one[2]] or tensors
    words = []
    for entry, relative, agrees in chosen[:_READ]:
        statistics = entry.summary.statistics
        span = f" from {statistics.least:.3g} to {statistics.most:.3g}" if statistics.count else ""
        odd = statistics.nan + statistics.inf + statistics.negative_inf
        apart = "" if agrees else f" by {relative:.2g}"
        words.append(
            f"{_name(entry, parameters)}{apart}: {entry.dtype} {list(entry.shape)}{span}"
            f"{f' with {odd:,} NaN or Inf' if odd else ''}"
        )
    return ", ".join(words)


def _name(entry: Entry, parameters: Mapping[int, str]) -> str:
    if entry.role == "input" and entry.position in parameters:
        return f"parameter {parameters[entry.position]}"
    return f"{entry.role} {entry.position}"

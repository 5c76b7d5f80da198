"""Many steps and many scopes: memory stays flat."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from frameworks import Double, Framework, Outcome, Step, X
from memory import counts, resident

ALLOWANCE = 3_000_000
"""Bytes that may come once, as an arena or two of the allocator's."""
LEAST = 30


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Repeat steps of one scope, then scopes of a step each."""
    tool = Double()
    with framework.scope(tool):
        steps, more = grown(lambda: step(X[0]), seconds / 2)

    def scope() -> None:
        with framework.scope(tool if framework.keeps else Double()):
            step(X[0])

    scopes, more_of_scopes = grown(scope, seconds / 2)
    tools = "one tool" if framework.keeps else "new tools"
    return Outcome(steps, f"steps; {scopes:,} scopes of {tools}", left=more + more_of_scopes)


def grown(repeat: Callable[[], object], seconds: float) -> tuple[int, list[str]]:
    """Repeat something; return how often, and what grew by half an object each or more.

    The first third of the time, in which caches fill, does not count.
    """
    start = monotonic()
    first = _repeat(repeat, start + seconds / 3, LEAST)
    before, held = counts(), resident()
    times = _repeat(repeat, start + seconds, 2 * LEAST)
    after, more = counts(), resident() - held
    left = [
        f"{after[name] - count:+,} {name} in {times:,}"
        for name, count in before.items()
        if after[name] - count > max(times / 2, 2 * LEAST)
    ]
    if more > ALLOWANCE and more > 100 * times:
        left.append(f"{more / 2**20:+.1f} MiB in {times:,}")
    return first + times, left


def _repeat(repeat: Callable[[], object], end: float, least: int) -> int:
    times = 0
    while times < least or monotonic() < end:
        repeat()
        times += 1
    return times
